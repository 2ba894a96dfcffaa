"""The batches that are saved: of tokens or texts, or of examples of which batches are made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, NamedTuple

import numpy as np
import torch

try:
    from transformer_lens.utilities import get_attention_mask
except ImportError:  # TransformerLens 2.x
    from transformer_lens.utils import get_attention_mask

_TOKEN_KEYS = ("tokens", "input_ids", "text")


class Batch(NamedTuple):
    """The input of one forward.

    Attributes:
        inputs: texts, or tokens `[batch, pos]`, as the forward gets them.
        tokens: `[batch, pos]`, on the CPU.
        mask: `[batch, pos]`, on the CPU: False is padding.
        arguments: the attention mask for the forward, if there is one.
    """

    inputs: Any
    tokens: torch.Tensor
    mask: torch.Tensor
    arguments: dict[str, Any]


class Batches:
    """The batches that a user gives; see `save_activations`.

    Args:
        items: batches or examples.
        model: whose tokenizer reads texts.
        batch_size: how many examples make a batch.
        prepend_bos: for texts.

    Raises:
        TypeError: while they are read, for an item that is neither.
        ValueError: for tokens and a mask of different shapes, or examples of different lengths.
    """

    def __init__(
        self, items: Iterable[Any], model: Any, batch_size: int, prepend_bos: bool | None
    ) -> None:
        if isinstance(items, (str, Mapping)):
            raise TypeError(
                f"batches must be an iterable of batches, but is a {type(items).__name__}: put it "
                "in a list"
            )
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"batch_size must be 1 or more examples, but is {batch_size!r}")
        self._items, self._model, self._batch_size = items, model, batch_size
        self._of_texts = {} if prepend_bos is None else {"prepend_bos": prepend_bos}
        self._has_examples = False

    def most_examples(self, in_first: int) -> int | None:
        """How many examples there are, if all batches are as large as the first; None if unknown.

        The last one may be smaller.
        """
        try:
            count = len(self._items) if isinstance(self._items, Sized) else None
        except TypeError:  # a DataLoader of an IterableDataset
            count = None
        return None if count is None else count * (1 if self._has_examples else in_first)

    def __iter__(self) -> Iterator[Batch]:
        examples: list[Any] = []
        for number, item in enumerate(self._items):
            tokens, mask = _tokens_and_mask(item, number)
            is_example = _is_example(tokens)
            if is_example:
                self._has_examples = True
                examples.append((tokens, mask))
            if examples and (not is_example or len(examples) == self._batch_size):
                yield self._batch_of(examples)
                examples = []
            if not is_example:
                yield self._batch(tokens, mask)
        if examples:
            yield self._batch_of(examples)

    def _batch_of(self, examples: list[Any]) -> Batch:
        tokens, masks = zip(*examples)
        if isinstance(tokens[0], str):
            return self._batch(list(tokens), None)
        if len(set(map(len, tokens))) > 1:
            raise ValueError(
                "examples of one batch have different numbers of tokens: pad all examples to one "
                "width, and give each an attention_mask"
            )
        mask = None if masks[0] is None else torch.stack(list(map(_tensor, masks)))
        return self._batch(torch.stack(list(map(_tensor, tokens))), mask)

    def _batch(self, inputs: Any, mask: Any) -> Batch:
        if not isinstance(inputs, torch.Tensor) and isinstance(inputs[0], str):
            return self._batch_of_texts(list(inputs))
        tokens = _tensor(inputs).clone()  # a loader may put its next batch into the same memory
        if tokens.dim() != 2 or not tokens.numel():
            raise ValueError(f"a batch must be tokens [batch, pos], but is {list(tokens.shape)}")
        ids = tokens.cpu().long()
        if mask is None:
            return Batch(tokens, ids, torch.ones(ids.shape, dtype=torch.bool, device="cpu"), {})
        mask = _tensor(mask).clone()
        if mask.shape != tokens.shape:
            raise ValueError(
                f"the attention_mask of a batch is {list(mask.shape)}, but its tokens are "
                f"{list(tokens.shape)}"
            )
        return Batch(tokens, ids, mask.cpu().bool(), {"attention_mask": mask})

    def _batch_of_texts(self, texts: list[str]) -> Batch:
        tokens = self._model.to_tokens(texts, **self._of_texts).cpu()
        prepend_bos = self._of_texts.get("prepend_bos", self._model.cfg.default_prepend_bos)
        mask = get_attention_mask(self._model.tokenizer, tokens, prepend_bos)
        return Batch(texts, tokens.long(), mask.bool(), self._of_texts)


def _tokens_and_mask(item: Any, number: int) -> tuple[Any, Any]:
    """The tokens or texts of an item, and its mask."""
    if isinstance(item, Mapping):
        for key in _TOKEN_KEYS:
            if key in item:
                return _no_array(item[key]), item.get("attention_mask")
        raise TypeError(
            f"item {number} of the batches is a dict with {sorted(map(str, item))}, but none of "
            f"{' and '.join(_TOKEN_KEYS)}"
        )
    item = _no_array(item)
    if isinstance(item, (list, tuple)) and len(item) == 1 and isinstance(item[0], torch.Tensor):
        return item[0], None  # as a DataLoader of a TensorDataset has them
    if isinstance(item, (str, torch.Tensor)):
        return item, None
    if isinstance(item, Sequence) and len(item) and not isinstance(item[0], torch.Tensor):
        return item, None
    raise TypeError(
        f"item {number} of the batches is a {type(item).__name__}: give tokens [batch, pos], texts,"
        ' or a dict with "tokens" and "attention_mask"'
    )


def _no_array(tokens: Any) -> Any:
    """Tokens of numpy, which may be of a dtype that no embedding takes, as a tensor."""
    return torch.from_numpy(tokens.astype(np.int64)) if isinstance(tokens, np.ndarray) else tokens


def _is_example(tokens: Any) -> bool:
    if isinstance(tokens, torch.Tensor):
        return tokens.dim() == 1
    return isinstance(tokens, str) or isinstance(tokens[0], int)


def _tensor(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.tensor(value)

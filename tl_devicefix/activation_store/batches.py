"""The batches that are saved: of tokens or texts, or of examples of which batches are made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any, NamedTuple

import torch

try:
    from transformer_lens.utilities import get_attention_mask
except ImportError:  # TransformerLens 2.x
    from transformer_lens.utils import get_attention_mask


class Batch(NamedTuple):
    """The input of one forward.

    Attributes:
        inputs: tokens `[batch, pos]`, where the user has them.
        tokens: the same, on the CPU.
        mask: `[batch, pos]`, on the CPU: False is padding.
        arguments: the attention mask for the forward, if there is one.
    """

    inputs: torch.Tensor
    tokens: torch.Tensor
    mask: torch.Tensor
    arguments: dict[str, Any]


class Batches:
    """The batches that a user gives; see `save_activations`.

    Args:
        items: batches or examples.
        model: whose tokenizer reads texts.
        batch_size: how many examples make a batch.

    Raises:
        TypeError: while they are read, for an item that is neither.
        ValueError: for tokens and a mask of different shapes, or examples of different lengths.
    """

    def __init__(self, items: Iterable[Any], model: Any, batch_size: int) -> None:
        if isinstance(items, (str, Mapping)):
            raise TypeError(
                f"batches must be an iterable of batches, but is a {type(items).__name__}: put it "
                "in a list"
            )
        if batch_size < 1:
            raise ValueError(f"batch_size must be 1 or more, but is {batch_size!r}")
        self._items, self._model, self._batch_size = items, model, batch_size
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
        examples: list[tuple[Any, Any]] = []
        for number, item in enumerate(self._items):
            tokens, mask = _tokens_and_mask(item, number)
            if isinstance(tokens, list) or (isinstance(tokens, torch.Tensor) and tokens.dim() != 1):
                yield self._batch(tokens, mask)
                continue
            self._has_examples = True
            examples.append((tokens, mask))
            if len(examples) == self._batch_size:
                yield self._batch_of(examples)
                examples = []
        if examples:
            yield self._batch_of(examples)

    def _batch_of(self, examples: list[tuple[Any, Any]]) -> Batch:
        tokens, masks = zip(*examples)
        if isinstance(tokens[0], str):
            return self._batch(list(tokens), None)
        if len(set(map(len, tokens))) > 1:
            raise ValueError(
                f"examples of one batch have {min(map(len, tokens))} to {max(map(len, tokens))} "
                "tokens: pad all examples to one width, and give each an attention_mask"
            )
        mask = None if masks[0] is None else torch.stack(list(map(torch.as_tensor, masks)))
        return self._batch(torch.stack(tokens), mask)

    def _batch(self, inputs: Any, mask: Any) -> Batch:
        if isinstance(inputs, list):
            inputs = self._model.to_tokens(inputs)
            bos = self._model.cfg.default_prepend_bos
            mask = get_attention_mask(self._model.tokenizer, inputs, bos)
            mask = None if mask.all() else mask
        if inputs.dim() != 2 or not inputs.numel():
            raise ValueError(
                f"a batch must be one or more tokens [batch, pos], but is {list(inputs.shape)}"
            )
        inputs = inputs.clone()  # a loader may put its next batch into the same memory
        tokens = inputs.cpu().long()
        if mask is None:
            return Batch(inputs, tokens, torch.ones_like(tokens, dtype=torch.bool), {})
        mask = torch.as_tensor(mask).clone()
        if mask.shape != inputs.shape:
            raise ValueError(
                f"the attention_mask of a batch is {list(mask.shape)}, but its tokens are "
                f"{list(inputs.shape)}: give one value for each token"
            )
        return Batch(inputs, tokens, mask.cpu().bool(), {"attention_mask": mask})


def _tokens_and_mask(item: Any, number: int) -> tuple[str | list[str] | torch.Tensor, Any]:
    """The tokens or texts of an item, and its mask."""
    tokens, mask = item, None
    if isinstance(item, Mapping):
        tokens, mask = item.get("tokens", item.get("input_ids")), item.get("attention_mask")
    elif isinstance(item, (list, tuple)) and len(item) == 1 and isinstance(item[0], torch.Tensor):
        (tokens,) = item  # as a DataLoader of a TensorDataset has them
    if isinstance(tokens, str):
        return tokens, None
    if isinstance(tokens, (list, tuple)) and len(tokens) and isinstance(tokens[0], str):
        return list(tokens), None
    try:
        tokens = torch.as_tensor(tokens)
    except (TypeError, ValueError, RuntimeError):
        tokens = torch.tensor(0)
    if not tokens.dim():
        kind = f"dict with {sorted(item)}" if isinstance(item, Mapping) else type(item).__name__
        raise TypeError(
            f"item {number} of batches is a {kind}: give tokens [batch, pos], texts, or a dict "
            'with "tokens" or "input_ids", and "attention_mask" if there is padding'
        )
    return tokens, mask

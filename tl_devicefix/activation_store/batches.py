"""The batches that are saved, of tokens or texts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from operator import length_hint
from typing import Any, NamedTuple

import torch

from tl_devicefix.activation_store.format import MASK, TOKEN_MASK, TOKENS
from tl_devicefix.activation_store.selection import Selection

try:
    from transformer_lens.utilities import get_attention_mask
except ImportError:  # TransformerLens 2.x
    from transformer_lens.utils import get_attention_mask


class Batch(NamedTuple):
    """The input of one forward.

    Attributes:
        inputs: tokens `[batch, pos]`, where the user has them.
        arguments: the attention mask for the forward, if there is one.
        stored: tokens and masks `[batch, pos]` that are stored beside activations, on the CPU.
        skip: how many of its examples are on disk already.
    """

    inputs: torch.Tensor
    arguments: dict[str, Any]
    stored: dict[str, torch.Tensor]
    skip: int = 0

    @property
    def saved(self) -> torch.Tensor | None:
        """Which tokens' activations are saved; None for all."""
        return self.stored.get(TOKEN_MASK)


class Batches:
    """The batches that a user gives; see `save_activations`.

    Args:
        items: the batches.
        model: whose tokenizer reads texts.
        selection: which says which tokens' activations are saved.

    Raises:
        TypeError: while they are read, for an item that is neither.
        ValueError: for tokens that are not `[batch, pos]`, or a mask of another shape.
    """

    def __init__(self, items: Iterable[Any], model: Any, selection: Selection) -> None:
        if isinstance(items, (str, Mapping)):
            raise TypeError(
                f"batches must be an iterable of batches, but is a {type(items).__name__}: give "
                "a list of them, such as [[text, text], [text]]"
            )
        self._items, self._model, self._selection = items, model, selection

    def most_examples(self, in_first: int) -> int | None:
        """How many examples there are, if all batches are as large as the first; None if unknown.

        The last one may be smaller.
        """
        count = length_hint(self._items, -1)
        return None if count < 0 else count * in_first

    def __iter__(self) -> Iterator[Batch]:
        for number, item in enumerate(self._items):
            yield self._batch(*_tokens_and_mask(item, number))

    def _batch(self, inputs: Any, mask: Any) -> Batch:
        if isinstance(inputs, list):
            inputs = self._model.to_tokens(inputs)
            bos = self._model.cfg.default_prepend_bos
            mask = get_attention_mask(self._model.tokenizer, inputs, bos)
            mask = None if mask.all() else mask
        if inputs.dim() != 2 or not inputs.numel():
            raise ValueError(
                f"a batch must be one or more tokens [batch, pos], but is {list(inputs.shape)}: "
                "make batches of examples, as tokens.split(8) or a DataLoader does"
            )
        inputs = inputs.clone()  # a loader may put its next batch into the same memory
        mask = None if mask is None else torch.as_tensor(mask).clone()
        if mask is not None and mask.shape != inputs.shape:
            raise ValueError(
                f"the attention_mask of a batch is {list(mask.shape)}, but its tokens are "
                f"{list(inputs.shape)}: give one value for each token"
            )
        tokens = inputs.cpu().long()
        seen = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.cpu().bool()
        stored = {TOKENS: tokens, MASK: seen}
        if (saved := self._selection.saved_tokens(tokens, seen)) is not None:
            stored[TOKEN_MASK] = saved
        return Batch(inputs, {} if mask is None else {"attention_mask": mask}, stored)


def _tokens_and_mask(item: Any, number: int) -> tuple[list[str] | torch.Tensor, Any]:
    """The tokens or texts of an item, and its mask."""
    tokens, mask = item, None
    if isinstance(item, Mapping):
        tokens, mask = item.get("tokens", item.get("input_ids")), item.get("attention_mask")
    elif isinstance(item, (list, tuple)) and len(item) == 1 and isinstance(item[0], torch.Tensor):
        (tokens,) = item  # as a DataLoader of a TensorDataset has them
    if isinstance(tokens, (list, tuple)) and len(tokens) and isinstance(tokens[0], str):
        return list(tokens), None
    try:
        tokens = torch.as_tensor(tokens)
    except (TypeError, ValueError, RuntimeError):
        tokens = torch.tensor(0)
    if not tokens.dim():
        kind = f"dict with {sorted(item)}" if isinstance(item, Mapping) else type(item).__name__
        raise TypeError(
            f"item {number} of batches is a {kind}: give tokens [batch, pos], a list of texts, or "
            'a dict with "tokens" or "input_ids", and "attention_mask" if there is padding'
        )
    return tokens, mask

"""Which mask `scaled_dot_product_attention` gets: none where it can do without.

A mask of every query and key is as large as the scores of one head; none is made where attention is
causal and nothing is padded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from tl_devicefix.simulation.tensor import has_values

F = TypeVar("F")
_UNPADDED, _COMPARED = "_tl_devicefix_unpadded", "_tl_devicefix_compared"
_FACTS = "_tl_devicefix_facts"
_PLAIN, _INFINITE = "_tl_devicefix_plain", "_tl_devicefix_infinite"
SOURCE = "_tl_devicefix_source"
"""Attribute of a mask that was carried to another device: the one that it is a copy of."""


@dataclass(frozen=True)
class Causal:
    """Which keys each query sees, as `apply_causal_mask` is told.

    Attributes:
        offset: how many keys come before those of the first query.
        padding: [batch, key_pos], zero where a key is seen by no one; None if there is none.
        window: how many keys a query sees at most, up to its own; None for all.
        edited: a mask that is there instead of the causal one, True where seen: [query_pos,
            key_pos], or as `mask` returns it.
        blind_mixes_all: whether a query that sees no key mixes all values alike; else nothing.
    """

    offset: int
    padding: torch.Tensor | None
    window: int | None
    edited: torch.Tensor | None = None
    blind_mixes_all: bool = False

    @property
    def may_be_blind(self) -> bool:
        """Whether there may be queries that see no key, not even their own."""
        return self.edited is not None or self._pads is not None

    def is_implied(self, n_queries: int, n_keys: int) -> bool:
        """Whether a query sees all keys up to its own: as many queries as keys, or the last one."""
        windowed = self.window is not None and self.window < n_keys
        simple = self.edited is None and self._pads is None and not windowed
        return simple and n_queries in (1, n_keys)

    def mask(self, n_queries: int, n_keys: int, device: torch.device) -> torch.Tensor:
        """What is seen: bool, [batch or 1, 1, query_pos, key_pos]."""
        seen = self._band(n_queries, n_keys, device)
        seen = seen if seen.dim() == 4 else seen[None, None]
        pads = self._pads
        return seen if pads is None else seen & pads.bool()[:, None, None, :]

    @property
    def _pads(self) -> torch.Tensor | None:
        return None if self.padding is None or unpadded(self.padding) else self.padding

    def _band(self, n_queries: int, n_keys: int, device: torch.device) -> torch.Tensor:
        if self.edited is not None:
            return self.edited
        band = torch.ones(n_queries, n_keys, dtype=torch.bool, device=device).tril_(self.offset)
        return band if self.window is None else band.triu_(self.offset + 1 - self.window)


def version_of(tensor: torch.Tensor) -> int | None:
    """How often a tensor has been changed; None of one of inference mode, which does not count."""
    return None if tensor.is_inference() else tensor._version


def source_of(mask: torch.Tensor) -> torch.Tensor:
    """The mask that a model was given, of a copy on a block's device."""
    source: torch.Tensor = getattr(mask, SOURCE, mask)
    return source


def unpadded(mask: torch.Tensor) -> bool:
    """Whether a mask leaves nothing out. Asked of the device once, so that blocks do not wait."""
    return _known(source_of(mask), _UNPADDED, lambda mask: bool(mask.all()), in_rehearsal=True)


def same_start(mask: torch.Tensor, earlier: torch.Tensor) -> bool:
    """Whether a mask begins as an earlier and shorter one did."""
    mask, earlier = source_of(mask), source_of(earlier)
    if mask is earlier or (unpadded(mask) and unpadded(earlier)):
        return True
    compared, same = getattr(mask, _COMPARED, (None, False))
    if compared is not earlier:
        length = earlier.shape[1]
        same = earlier.shape[0] == mask.shape[0] and torch.equal(mask[:, :length], earlier)
        setattr(mask, _COMPARED, (earlier, same))
    return same


def is_causal_mask(mask: torch.Tensor, window: int | None) -> bool:
    """Whether a mask of all queries and keys is the one that TransformerLens makes.

    TransformerLens 2 keeps it in a buffer, which people edit.
    """

    def is_plain(mask: torch.Tensor) -> bool:
        plain = torch.ones_like(mask).tril_()
        return torch.equal(mask, plain if window is None else plain.triu_(1 - window))

    return _known(mask, f"{_PLAIN}_{window}", is_plain, in_rehearsal=True)


@dataclass(frozen=True)
class Facts:
    """What a mask of all queries and keys comes to."""

    is_causal: bool
    """Whether each query sees all keys up to its own, and nothing is added."""
    adds: bool
    """Whether it adds anything to scores of keys that are seen."""
    blinds: bool
    """Whether there are queries that see no key."""


def facts(mask: torch.Tensor, lowest: float) -> Facts:
    """What is true of a mask [batch or 1, 1, query_pos, key_pos], found out once for all blocks.

    Args:
        mask: True where a key is seen, or what is added to its score.
        lowest: what is added to the score of a key that is not seen.
    """

    def find_out(mask: torch.Tensor) -> Facts:
        seen = seen_by(mask, lowest)
        adds = mask.dtype != torch.bool and bool(mask.masked_fill(~seen, 0.0).any())
        offset = mask.shape[3] - mask.shape[2]
        causal = torch.ones_like(seen[0, 0]).tril_(offset)
        is_causal = not adds and bool((seen == causal).all())
        return Facts(is_causal, adds, not is_causal and not bool(seen.any(dim=-1).all()))

    return _known(mask, _FACTS, find_out, in_rehearsal=Facts(True, False, False))


def seen_by(mask: torch.Tensor, lowest: float) -> torch.Tensor:
    """Which keys are seen, by a mask that says so or is added."""
    return mask if mask.dtype == torch.bool else mask > lowest


def is_minus_infinity(scalar: torch.Tensor) -> bool:
    """Whether what TransformerLens puts where nothing is seen is what it was made with."""
    return _known(scalar, _INFINITE, lambda scalar: bool(torch.isneginf(scalar)), in_rehearsal=True)


def _known(
    tensor: torch.Tensor, name: str, find_out: Callable[[torch.Tensor], F], in_rehearsal: F
) -> F:
    """A fact about a tensor's values, found out once for as long as it is not changed.

    In a rehearsal there are none: masks are taken for causal ones, that leave nothing out.
    """
    if not has_values(tensor):
        return in_rehearsal
    version, known = getattr(tensor, name, (-1, None))
    if version != version_of(tensor):
        known = find_out(tensor)
        setattr(tensor, name, (version_of(tensor), known))
    return known  # type: ignore[return-value]

"""Which mask `scaled_dot_product_attention` gets: none where it can do without.

A mask of every query and key is as large as the scores of one head; none is made where attention is
causal and nothing is padded.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.utils.weak import WeakIdRef

from tl_devicefix.attending.known import known, known_of_users, made_once

Seen = tuple[torch.Tensor, torch.Tensor | None]
SOURCE = "_tl_devicefix_source"
"""Attribute of a mask that was carried to another device: the one that it is a copy of."""


@dataclass(eq=False)
class Causal:
    """Which keys each query sees, as `apply_causal_mask` is told.

    Attributes:
        offset: how many keys come before those of the first query.
        padding: [batch, key_pos], zero where a key is seen by no one; None if there is none.
        window: how many keys a query sees at most, up to its own; None for all.
        edited: a mask that is there instead of the causal one, True where seen: [query_pos,
            key_pos], or as `seen` returns it.
        blind_mixes_all: whether a query that sees no key mixes all values alike; else nothing.
    """

    offset: int
    padding: torch.Tensor | None = None
    window: int | None = None
    edited: torch.Tensor | None = None
    blind_mixes_all: bool = False
    _seen: dict[tuple[int, int, torch.device], Seen] = field(
        default_factory=dict, init=False, repr=False
    )

    def is_implied(self, n_queries: int, n_keys: int) -> bool:
        """Whether a query sees all keys up to its own: as many queries as keys, or the last one."""
        windowed = self.window is not None and self.window < n_keys
        simple = self.edited is None and self._pads is None and not windowed
        return simple and n_queries in (1, n_keys)

    def seen(self, n_queries: int, n_keys: int, device: torch.device) -> Seen:
        """What is seen, and by whom nothing is, made once.

        Returns:
            Bool [batch or 1, 1, query_pos, key_pos], in which a query that sees no key sees all, so
            that no kernel is asked for a mean of none; and which these are, [batch or 1, 1,
            query_pos, 1], or None if there can be none.
        """
        key = n_queries, n_keys, device
        if key not in self._seen:
            self._seen[key] = self._make(*key)
        return self._seen[key]

    def _make(self, n_queries: int, n_keys: int, device: torch.device) -> Seen:
        mask = self._band(n_queries, n_keys, device)
        mask = mask if mask.dim() == 4 else mask[None, None]
        pads = self._pads
        if pads is not None:
            mask = mask & pads.bool()[:, None, None, :]
        if self.edited is None and pads is None:
            return mask, None
        blind = ~mask.any(dim=-1, keepdim=True)
        return mask | blind, blind

    @property
    def _pads(self) -> torch.Tensor | None:
        return None if self.padding is None or unpadded(self.padding) else self.padding

    def _band(self, n_queries: int, n_keys: int, device: torch.device) -> torch.Tensor:
        if self.edited is not None:
            return self.edited
        band = torch.ones(n_queries, n_keys, dtype=torch.bool, device=device).tril_(self.offset)
        return band if self.window is None else band.triu_(self.offset + 1 - self.window)


def causal(offset: int, padding: torch.Tensor | None = None, window: int | None = None) -> Causal:
    """The one for all blocks of a forward that are told the same."""
    return made_once(padding, ("causal", offset, window), lambda: Causal(offset, padding, window))


def source_of(mask: torch.Tensor) -> torch.Tensor:
    """The mask that a model was given, of a copy on a block's device."""
    source: torch.Tensor = getattr(mask, SOURCE, mask)
    return source


def unpadded(mask: torch.Tensor) -> bool:
    """Whether a mask leaves nothing out. Asked of the device once, so that blocks do not wait."""
    return known_of_users(
        source_of(mask), "unpadded", lambda mask: bool(mask.all()), in_rehearsal=True
    )


def as_now(mask: torch.Tensor) -> torch.Tensor:
    """A mask whose changes are counted: of one of inference mode, a copy for the whole forward."""
    mask = source_of(mask)
    if not mask.is_inference():
        return mask
    with torch.inference_mode(False):
        return known(mask, "as now", torch.clone, in_rehearsal=mask)


def same_start(mask: torch.Tensor, earlier: torch.Tensor) -> bool:
    """Whether a mask begins as an earlier and shorter one did."""
    mask, earlier = source_of(mask), source_of(earlier)
    if mask is earlier or (unpadded(mask) and unpadded(earlier)):
        return True

    def compare(mask: torch.Tensor) -> bool:
        same_batch = earlier.shape[0] == mask.shape[0]
        return same_batch and torch.equal(mask[:, : earlier.shape[1]], earlier)

    return known(mask, ("starts as", WeakIdRef(earlier)), compare, in_rehearsal=True)


def is_causal_mask(mask: torch.Tensor, window: int | None) -> bool:
    """Whether a mask of all queries and keys is the one that TransformerLens makes.

    TransformerLens 2 keeps it in a buffer, which people edit.
    """

    def is_plain(mask: torch.Tensor) -> bool:
        plain = torch.ones_like(mask).tril_()
        return torch.equal(mask, plain if window is None else plain.triu_(1 - window))

    return known(mask, ("plain", window), is_plain, in_rehearsal=True)


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

    return known_of_users(mask, "facts", find_out, in_rehearsal=Facts(True, False, False))


def seen_by(mask: torch.Tensor, lowest: float) -> torch.Tensor:
    """Which keys are seen, by a mask that says so or is added."""
    return mask if mask.dtype == torch.bool else mask > lowest


def is_minus_infinity(scalar: torch.Tensor) -> bool:
    """Whether what TransformerLens puts where nothing is seen is what it was made with."""
    return known(scalar, "infinite", lambda scalar: bool(scalar.isneginf()), in_rehearsal=True)

"""KV caches that grow in place, and whose keys are rotated once.

TransformerLens copies a block's whole entry for each token, and rotates all of its keys again. Here
an entry's tensors are the beginning of larger ones:

    past_keys     [k0 k1 ... k191 | room            ]   a view of the first 192
    rotated keys  [r0 r1 ... r191 | room            ]   kept beside them

If an entry was frozen, copied, sliced or edited, we fall back to TransformerLens's `append`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from jaxtyping import Float, Int

from tl_devicefix.fusing.listening import unsupported_mode
from tl_devicefix.monkeypatch.patch import package_of
from tl_devicefix.placement.devices import has_values

Prompts = dict[int, tuple[Any, bool]]
prompts: ContextVar[Prompts | None] = ContextVar("tl_devicefix_prompts", default=None)
"""Within `HookedTransformer.generate`, which entries of its cache have a padded prompt, by id.

Each entry is kept, because another one could get its id.
"""
Padding = Int[torch.Tensor, "batch key_pos"]
Heads = Float[torch.Tensor, "batch pos kv_head_index d_head"]
_GROWN = "_tl_devicefix_grown"
_LEAST_ROOM = 64
GROWS_FROM = 192
"""The length from which an entry grows in place, because copying is faster up to there."""


def append(entry: Any, new_keys: Heads, new_values: Heads) -> tuple[Heads, Heads]:
    """Append to a block's entry of a KV cache, and return all keys and all values."""
    is_short = entry.past_keys.shape[1] < GROWS_FROM
    if is_short or entry.frozen or not _fits(entry, new_keys, new_values):
        appended: tuple[Heads, Heads] = entry.append(new_keys, new_values)
        return appended
    grown = vars(entry).get(_GROWN)
    length = entry.past_keys.shape[1] + new_keys.shape[1]
    if grown is None or not grown.is_of(entry) or length > grown.room:
        grown = vars(entry)[_GROWN] = _Grown(entry, length)
    entry.past_keys, entry.past_values = grown.append(new_keys, new_values)
    return entry.past_keys, entry.past_values


def let_go(entry: Any) -> None:
    """Free the room behind an entry's tensors, because they are about to be replaced."""
    vars(entry).pop(_GROWN, None)


def rotated_keys(
    entry: Any, keys: Heads, tables: tuple[Any, ...] | None, rotate: Callable[[Heads, int], Heads]
) -> Heads:
    """Rotate the keys that `append` returned, each only once.

    Args:
        entry: the block's entry.
        keys: all keys.
        tables: names the rotation; keys are rotated again if it changes, and always if it is None.
        rotate: takes keys and the position of the first one.
    """
    grown = vars(entry).get(_GROWN)
    if grown is None or grown.keys is not keys or tables is None:
        return rotate(keys, 0)
    rotated: Heads = grown.rotated(tables, rotate)
    return rotated


def is_padded(padding: Padding | None, entry: Any) -> bool:
    """Return True if a mask leaves a token out, for which the host waits for the device.

    `generate` is asked for its prompt only, because a host that waits at each token is slow.
    """
    if padding is None or not has_values(padding):
        return False
    kept = None if entry is None else prompts.get()
    if kept is not None and id(entry) in kept:
        return kept[id(entry)][1]
    leaves_out = not bool((padding == 1).all())
    if kept is not None:
        kept[id(entry)] = entry, leaves_out
    return leaves_out


def _fits(entry: Any, new_keys: Heads, new_values: Heads) -> bool:
    """Return True if new keys can be written in place, which graphs of gradients forbid."""
    if torch.is_grad_enabled() or unsupported_mode() is not None:
        return False
    if package_of(type(entry).append) != "transformer_lens":
        return False
    return all(
        past.dim() == 4
        and (past.shape[0], *past.shape[2:]) == (new.shape[0], *new.shape[2:])
        and (past.dtype, past.device) == (new.dtype, new.device)
        for past, new in ((entry.past_keys, new_keys), (entry.past_values, new_values))
    )


class _Grown:
    """Tensors with room, whose beginning is an entry's keys and values."""

    def __init__(self, entry: Any, length: int) -> None:
        self.room = length + max(length // 4, _LEAST_ROOM)
        self._all_keys = _with_room(entry.past_keys, self.room)
        self._all_values = _with_room(entry.past_values, self.room)
        self._rotated: torch.Tensor | None = None
        self._tables: tuple[Any, ...] = ()
        self._n_rotated = 0
        self.keys, self.values = entry.past_keys, entry.past_values
        self._version = self._all_keys._version

    def is_of(self, entry: Any) -> bool:
        """Return True if an entry's tensors are the ones that were put there last."""
        return entry.past_keys is self.keys and entry.past_values is self.values

    def append(self, new_keys: Heads, new_values: Heads) -> tuple[Heads, Heads]:
        """Append both; returns all of both."""
        if self._version != self._all_keys._version:  # because somebody else has written to keys
            self._rotated = None
        start, end = self.keys.shape[1], self.keys.shape[1] + new_keys.shape[1]
        # By .data, because it changes nothing that graphs hold.
        self._all_keys.data[:, start:end] = new_keys
        self._all_values.data[:, start:end] = new_values
        self.keys, self.values = self._all_keys[:, :end], self._all_values[:, :end]
        self._version = self._all_keys._version
        return self.keys, self.values

    def rotated(self, tables: tuple[Any, ...], rotate: Callable[[Heads, int], Heads]) -> Heads:
        """Return all keys, rotated; they are kept, so nobody else may write to them."""
        if self._tables != tables:
            self._rotated = None
        start, end = 0 if self._rotated is None else self._n_rotated, self.keys.shape[1]
        new = rotate(self.keys[:, start:], start)
        if self._rotated is None:
            self._rotated = _room(new, self.room)
        self._rotated.data[:, start:end] = new
        self._tables, self._n_rotated = tables, end
        return self._rotated[:, :end]

    def __reduce__(self) -> Any:
        return type(None), ()  # because a copied or saved entry begins anew


def _with_room(start: Heads, room: int) -> Heads:
    tensor = _room(start, room)
    tensor[:, : start.shape[1]] = start
    return tensor


def _room(like: Heads, room: int) -> Heads:
    batch, _, heads, d_head = like.shape
    with torch.inference_mode(False):  # because torch does not count changes of inference tensors
        return like.new_empty((batch, heads, room, d_head)).transpose(1, 2)

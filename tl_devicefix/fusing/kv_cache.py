"""KV caches that grow in place, and rotate each key once.

TransformerLens copies a block's whole entry for each token, and rotates all of its keys again.
Here, from 192 tokens on, each tensor of an entry is a view of a larger one, with room for more:

    past_keys     [k0 k1 ... k191 | room            ]   a view of the first 192
    rotated keys  [r0 r1 ... r191 | room            ]   cached here

Shorter and frozen entries, and all entries under autograd, use TransformerLens's `append`. If an
entry's tensors were replaced, the new ones are copied to larger ones; if its keys were edited in
place, all of them are rotated again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float

from tl_devicefix.monkeypatch.patch import package_of

if TYPE_CHECKING:  # TransformerLens 2 has the class under another name
    from transformer_lens import TransformerLensKeyValueCacheEntry as Entry

Heads = Float[torch.Tensor, "batch pos kv_head_index d_head"]
Rotate = Callable[[Heads, int], Heads]
_PREALLOCATED = "_tl_devicefix_preallocated"
MIN_ROOM = 64  # tokens
GROWS_FROM = 192  # tokens; copying fewer is faster than growing in place


def append(entry: Entry, new_keys: Heads, new_values: Heads) -> tuple[Heads, Heads]:
    """Append to a block's entry of a KV cache, and return all keys and all values."""
    is_short = entry.past_keys.shape[1] < GROWS_FROM
    if is_short or entry.frozen or not _fits(entry, new_keys, new_values):
        return entry.append(new_keys, new_values)
    allocated = vars(entry).get(_PREALLOCATED)
    length = entry.past_keys.shape[1] + new_keys.shape[1]
    if allocated is None or not allocated.is_of(entry) or length > allocated.room:
        allocated = vars(entry)[_PREALLOCATED] = _Preallocated(entry, length)
    entry.past_keys, entry.past_values = allocated.append(new_keys, new_values)
    return entry.past_keys, entry.past_values


def drop_room(entry: Entry) -> None:
    """Free the preallocated tensors of an entry whose keys and values were replaced."""
    vars(entry).pop(_PREALLOCATED, None)


def rotated_keys(
    entry: Entry, keys: Heads, tables: tuple[object, ...] | None, rotate: Rotate
) -> Heads:
    """Rotate the keys that `append` returned, each only once.

    `rotate` takes keys and the position of the first one. `tables` are the `state_of` each rotary
    table. If one changes, or for None, all keys are rotated.
    """
    allocated = vars(entry).get(_PREALLOCATED)
    if allocated is None or allocated.keys is not keys or tables is None:
        return rotate(keys, 0)
    return allocated.rotated(tables, rotate)


def _fits(entry: Entry, new_keys: Heads, new_values: Heads) -> bool:
    """Return True if new keys and values can be written in place."""
    # An autograd graph may have saved the tensors that would be written to.
    if torch.is_grad_enabled():
        return False
    if package_of(type(entry).append) != "transformer_lens":  # a user's own
        return False
    return all(
        (past.shape[0], *past.shape[2:]) == (new.shape[0], *new.shape[2:])  # all but the tokens
        and (past.dtype, past.device) == (new.dtype, new.device)
        for past, new in ((entry.past_keys, new_keys), (entry.past_values, new_values))
    )


class _Preallocated:
    """Tensors with room for more tokens, of which an entry's keys and values are views."""

    def __init__(self, entry: Entry, length: int) -> None:
        # Grow by a quarter, so that copies are amortised.
        self.room = length + max(length // 4, MIN_ROOM)
        self._all_keys = _with_room(entry.past_keys, self.room)  # [batch, room, kv_head, d_head]
        self._all_values = _with_room(entry.past_values, self.room)
        self._rotated: Heads | None = None
        self._tables: tuple[object, ...] = ()
        self._n_rotated = 0
        self.keys, self.values = entry.past_keys, entry.past_values
        self._version = self._all_keys._version

    def is_of(self, entry: Entry) -> bool:
        """Return True if an entry's tensors are those of the last `append`."""
        return entry.past_keys is self.keys and entry.past_values is self.values

    def append(self, new_keys: Heads, new_values: Heads) -> tuple[Heads, Heads]:
        """Append keys and values, and return all keys and all values."""
        if self._version != self._all_keys._version:  # other code has written to the keys
            self._rotated = None
        start, end = self.keys.shape[1], self.keys.shape[1] + new_keys.shape[1]
        # Writing to `.data` does not raise the version, which autograd checks if a graph has saved
        # earlier keys: they do not change.
        self._all_keys.data[:, start:end] = new_keys
        self._all_values.data[:, start:end] = new_values
        self.keys, self.values = self._all_keys[:, :end], self._all_values[:, :end]
        self._version = self._all_keys._version
        return self.keys, self.values

    def rotated(self, tables: tuple[object, ...], rotate: Rotate) -> Heads:
        """Return all keys, rotated. The caller must not write to them: they are cached."""
        if self._tables != tables:
            self._rotated = None
        start, end = 0 if self._rotated is None else self._n_rotated, self.keys.shape[1]
        new = rotate(self.keys[:, start:], start)  # [batch, new_pos, kv_head, d_head]
        if self._rotated is None:
            self._rotated = _with_room(new, self.room)
        else:
            self._rotated.data[:, start:end] = new
        self._tables, self._n_rotated = tables, end
        return self._rotated[:, :end]

    def __reduce__(self) -> tuple[object, ...]:
        return type(None), ()  # deep copies and pickles of an entry have None instead


def _with_room(start: Heads, room: int) -> Heads:
    batch, length, heads, d_head = start.shape
    with torch.inference_mode(False):  # inference tensors have no version counter
        # Each head is contiguous in memory: SDPA and the pattern read head by head.
        tensor = start.new_empty((batch, heads, room, d_head)).transpose(1, 2)
    tensor[:, :length] = start
    return tensor

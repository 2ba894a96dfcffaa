"""KV caches that grow in place: what is appended is written behind what is there.

TransformerLens makes all of a cache anew for each token, and rotates all of its keys. Here an
entry's `past_keys` and `past_values` are the beginning of larger tensors, which have room; and keys
that are rotated once stay so. Whatever else becomes of an entry (frozen, copied, cut, its tensors
exchanged or edited), it is appended to as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tl_devicefix.attending.masks import as_now, same_start

_GROWN = "_tl_devicefix_grown"
_LEAST_ROOM = 64


class GrowingEntry:
    """A block's entry of a KV cache, as the block's forward reads and appends to it.

    Args:
        entry: TransformerLens's own.
    """

    def __init__(self, entry: Any) -> None:
        self._entry = entry

    def __getattr__(self, name: str) -> Any:
        return getattr(self._entry, name)

    def append(
        self, new_keys: torch.Tensor, new_values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [batch, new_pos, kv_head_index, d_head]; returns all keys and all values."""
        entry = self._entry
        if entry.frozen or not _fits(entry, new_keys, new_values):
            appended: tuple[torch.Tensor, torch.Tensor] = entry.append(new_keys, new_values)
            return appended
        with torch.inference_mode(False), torch.no_grad():
            grown = vars(entry).get(_GROWN)
            if grown is None or not grown.belongs_to(entry):
                grown = vars(entry)[_GROWN] = _Grown(entry)
            keys, values = grown.append(new_keys, new_values)
            entry.past_keys, entry.past_values = keys, values
            # The block's own view of them, which knows where it is from; the entry's does not.
            keys = keys[:]
            setattr(keys, _GROWN, grown)
        return keys, values


def let_go(entry: Any) -> None:
    """Let go of the room behind an entry's tensors, which are exchanged for others."""
    vars(entry).pop(_GROWN, None)


def _fits(entry: Any, new_keys: torch.Tensor, new_values: torch.Tensor) -> bool:
    """Whether it can be written behind what is there; in a graph, what is there is needed."""
    if torch.is_grad_enabled():
        return False
    return all(
        past.dim() == 4
        and (past.shape[0], *past.shape[2:]) == (new.shape[0], *new.shape[2:])
        and (past.dtype, past.device) == (new.dtype, new.device)
        for past, new in ((entry.past_keys, new_keys), (entry.past_values, new_values))
    )


def rotated_once(
    attention: Any,
    keys: torch.Tensor,
    mask: torch.Tensor | None,
    rotate: Callable[[torch.Tensor, int], torch.Tensor],
) -> torch.Tensor | None:
    """All keys of a growing entry rotated; None if they are no such keys.

    Args:
        attention: the block's, with the rotary tables.
        keys: [batch, pos, kv_head_index, d_head].
        mask: which keys are padding, [batch, pos].
        rotate: rotates some keys, of which the first is at a position.
    """
    grown = getattr(keys, _GROWN, None)
    if grown is None:
        return None
    with torch.inference_mode(False), torch.no_grad():
        rotated: torch.Tensor = grown.rotated(attention, keys, mask, rotate)
    return rotated


class _Room:
    """A tensor [batch, pos, kv_head_index, d_head] with room at its end.

    Args:
        start: what it begins with.
        length: how many positions it is for.
    """

    def __init__(self, start: torch.Tensor, length: int) -> None:
        self.length = 0
        self._whole = start.new_empty((start.shape[0], length, *start.shape[2:]))
        self._version = self._whole._version
        self.append(start)

    @property
    def is_full_at(self) -> int:
        """How many positions there is room for."""
        return self._whole.shape[1]

    @property
    def is_edited(self) -> bool:
        """Whether someone else has written to it since."""
        return self._whole._version != self._version

    def append(self, new: torch.Tensor) -> torch.Tensor:
        """Write it behind what is there; returns all."""
        end = self.length + new.shape[1]
        self._whole.data[:, self.length : end] = new  # not a change of what graphs hold of it
        self.length = end
        self._version = self._whole._version
        return self._whole[:, :end]


def _with_room(start: torch.Tensor, length: int) -> _Room:
    return _Room(start, length + max(length // 4, _LEAST_ROOM))


def _with_version(mask: torch.Tensor | None) -> tuple[torch.Tensor, int] | None:
    return None if mask is None else (as_now(mask), as_now(mask)._version)


Tables = list[tuple[torch.Tensor, int | None]]


def _tables_of(attention: Any) -> Tables:
    """A block's rotary tables, and how often they were changed."""
    tables = attention.rotary_cos, attention.rotary_sin
    return [(each, None if each.is_inference() else each._version) for each in tables]


def _same(before: Tables, now: Tables) -> bool:
    """Whether they are the tables of before; rotating may have made others."""
    return all(one is other and n == m for (one, n), (other, m) in zip(before, now))


class _Grown:
    """What an entry's keys and values are the beginning of.

    Args:
        entry: TransformerLens's.
    """

    def __init__(self, entry: Any) -> None:
        self._keys: _Room | None = None
        self._values: _Room | None = None
        self._past: tuple[torch.Tensor, torch.Tensor] = entry.past_keys, entry.past_values
        self._rotated: _Room | None = None
        self._tables: Tables | None = None
        # The mask of when they were rotated, and its version, as it may be edited since.
        self._mask: tuple[torch.Tensor, int] | None = None

    def belongs_to(self, entry: Any) -> bool:
        """Whether an entry's tensors are the ones that were put there last."""
        there: tuple[Any, Any] = entry.past_keys, entry.past_values
        return all(a is b for a, b in zip(there, self._past))

    def append(
        self, new_keys: torch.Tensor, new_values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append both; returns all of both."""
        length = self._past[0].shape[1] + new_keys.shape[1]
        if self._keys is None or self._values is None or length > self._keys.is_full_at:
            was_edited = self._keys is not None and self._keys.is_edited
            self._keys, self._values = (_with_room(past, length) for past in self._past)
            if was_edited:
                self._rotated = None
        elif self._keys.is_edited:
            self._rotated = None
        self._past = self._keys.append(new_keys), self._values.append(new_values)
        return self._past

    def rotated(
        self,
        attention: Any,
        keys: torch.Tensor,
        mask: torch.Tensor | None,
        rotate: Callable[[torch.Tensor, int], torch.Tensor],
    ) -> torch.Tensor:
        """All keys, rotated; those that were rotated before as they are, if that still holds."""
        there = self._rotated
        if there is not None and self._still_holds(there, keys, mask):
            new = rotate(keys[:, there.length :], there.length)
            if self._tables is not None and _same(self._tables, _tables_of(attention)):
                if keys.shape[1] > there.is_full_at:
                    there = _with_room(there.append(new[:, :0]), keys.shape[1])
                self._rotated, self._mask = there, _with_version(mask)
                return there.append(new)
        everything = rotate(keys, 0)
        self._rotated = _with_room(everything, keys.shape[1])
        self._tables = _tables_of(attention)
        self._mask = _with_version(mask)
        return self._rotated.append(everything[:, :0])

    def _still_holds(self, there: _Room, keys: torch.Tensor, mask: torch.Tensor | None) -> bool:
        if there.is_edited or there.length > keys.shape[1]:
            return False
        if mask is None or self._mask is None:
            return mask is None and self._mask is None
        earlier, version = self._mask
        return version == earlier._version and same_start(mask, earlier)

    # A copy of an entry, or one that was saved, begins anew.

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()

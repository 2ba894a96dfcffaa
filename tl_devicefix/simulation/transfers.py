"""Copies between devices, one by one and together for each pair of devices."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, SupportsIndex, overload

import torch


@dataclass(frozen=True)
class Transfer:
    """One copy of a tensor from a device to another."""

    source: torch.device
    """The device the tensor was on."""
    target: torch.device
    """The device it was copied to."""
    bytes: int
    """The size of the copy, in bytes."""
    shape: torch.Size
    """The shape of the copy."""


@dataclass(frozen=True)
class Moved:
    """What went from a device to another: how many copies, and their bytes."""

    count: int
    """How many copies."""
    bytes: int
    """Their sum."""


class Pair(NamedTuple):
    """Between which devices."""

    source: torch.device
    target: torch.device


def by_pair(
    transfers: Iterable[Transfer], before: Mapping[Pair, Moved] = MappingProxyType({})
) -> dict[Pair, Moved]:
    """Sum transfers by their pair of devices: ``(source, target)`` -> count and bytes, in order.

    Args:
        transfers: one by one.
        before: sums of others, which are added.
    """
    pairs = dict(before)
    for each in transfers:
        pair = Pair(each.source, each.target)
        so_far = pairs.get(pair, Moved(0, 0))
        pairs[pair] = Moved(so_far.count + 1, so_far.bytes + each.bytes)
    return dict(sorted(pairs.items(), key=lambda item: [_order(device) for device in item[0]]))


def _order(device: torch.device) -> tuple[str, int]:
    return device.type, -1 if device.index is None else device.index


_KEPT = 10_000


class Transfers(list[Transfer]):
    """A list of transfers, in the order they were made. Printing it shows a line for each pair.

    It has the last 10 000 to 20 000; sums, as printed and by `by_pair`, are those of all.
    """

    _before: Mapping[Pair, Moved] = MappingProxyType({})
    """The sums of those that it has no more."""

    def append(self, transfer: Transfer) -> None:
        """Add one; of too many, the older ones are only summed from then on."""
        super().append(transfer)
        if len(self) >= 2 * _KEPT:
            before = by_pair(self[:_KEPT], self._before)
            self._before, self[:_KEPT] = before, []

    def clear(self) -> None:
        """Forget all, and the sums."""
        super().clear()
        self._before = {}

    def copy(self) -> Transfers:
        """Return another list of the same, with their sums."""
        return copy.copy(self)

    @overload
    def __getitem__(self, index: SupportsIndex) -> Transfer: ...

    @overload
    def __getitem__(self, index: slice) -> Transfers: ...

    def __getitem__(self, index: SupportsIndex | slice) -> Transfer | Transfers:
        """One of them, or those of a slice, which are `Transfers` too."""
        found = super().__getitem__(index)
        return Transfers(found) if isinstance(found, list) else found

    def by_pair(self) -> dict[Pair, Moved]:
        """What went between each two devices: ``(source, target)`` -> count and bytes, in order."""
        return by_pair(self, self._before)

    def together(self) -> Moved:
        """How many there were in all, and their bytes."""
        sums = self.by_pair().values()
        return Moved(sum(each.count for each in sums), sum(each.bytes for each in sums))

    def __repr__(self) -> str:
        pairs = self.by_pair()
        rows = [
            (f"{source} -> {target}", str(moved.count), readable(moved.bytes))
            for (source, target), moved in pairs.items()
        ]
        together = self.together()
        rows.append(("all", str(together.count), readable(together.bytes)))
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        return "\n".join(
            f"{pair:<{widths[0]}}  {count:>{widths[1]}}  {size:>{widths[2]}}"
            for pair, count, size in rows
        )


def readable(nbytes: int) -> str:
    """A size as torch writes it ("1.50 GiB")."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} bytes"

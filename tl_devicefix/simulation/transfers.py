"""Copies between devices, one by one and together for each pair of devices."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import SupportsIndex, overload

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


def by_pair(transfers: Iterable[Transfer]) -> dict[tuple[torch.device, torch.device], Moved]:
    """What went between each two devices: ``(source, target)`` -> count and bytes, in order."""
    pairs: dict[tuple[torch.device, torch.device], Moved] = {}
    for each in transfers:
        so_far = pairs.get((each.source, each.target), Moved(0, 0))
        moved = Moved(so_far.count + 1, so_far.bytes + each.bytes)
        pairs[each.source, each.target] = moved
    return dict(sorted(pairs.items(), key=lambda item: [_order(device) for device in item[0]]))


def _order(device: torch.device) -> tuple[str, int]:
    return device.type, -1 if device.index is None else device.index


class Transfers(list[Transfer]):
    """A list of transfers, in the order they were made. Printing it shows a line for each pair."""

    @overload
    def __getitem__(self, index: SupportsIndex) -> Transfer: ...

    @overload
    def __getitem__(self, index: slice) -> Transfers: ...

    def __getitem__(self, index: SupportsIndex | slice) -> Transfer | Transfers:
        """One of them, or those of a slice, which are `Transfers` too."""
        found = super().__getitem__(index)
        return Transfers(found) if isinstance(found, list) else found

    def by_pair(self) -> dict[tuple[torch.device, torch.device], Moved]:
        """What went between each two devices: ``(source, target)`` -> count and bytes, in order."""
        return by_pair(self)

    def __repr__(self) -> str:
        pairs = self.by_pair()
        rows = [
            (f"{source} -> {target}", str(moved.count), readable(moved.bytes))
            for (source, target), moved in pairs.items()
        ]
        rows.append(("all", str(len(self)), readable(sum(each.bytes for each in self))))
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

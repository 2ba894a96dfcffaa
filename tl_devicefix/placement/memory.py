"""Parse and print sizes of memory, and limit devices' memory; recognise out-of-memory errors."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch

from tl_devicefix.errors import shown
from tl_devicefix.placement.devices import DeviceLike, free_memory, resolve

MaxMemory = Mapping[DeviceLike, int | str] | int | str
"""Device (or its index) -> most bytes to use there, as accelerate writes it: {0: "20GiB"}; or one
size that applies to every device."""

Limits = Mapping[torch.device, int]
"""A `MaxMemory` with each device as a `torch.device`, and sizes in bytes."""

_PREFIXES = " KMGT"


def by_device(
    max_memory: MaxMemory | Limits | None, home: torch.device, devices: Sequence[torch.device] = ()
) -> Limits:
    """Resolve the devices in `max_memory`, and parse its sizes; one size is for all `devices`."""
    if max_memory is None:
        return {}
    if not isinstance(max_memory, Mapping):
        return dict.fromkeys(devices, parse_bytes(max_memory, "max_memory"))
    limits: dict[torch.device, int] = {}
    for key, limit in max_memory.items():
        try:
            named = resolve(key, home)
        except ValueError as error:
            raise ValueError(f"max_memory names {shown(key)}, but {error}") from error
        limits.setdefault(named, parse_bytes(limit, f"max_memory[{key!r}]"))
    return limits


def capacity(device: torch.device, limits: Limits) -> int | None:
    """Return the bytes to use on `device`, the smaller of its free memory and the user's limit.

    None if neither is known.
    """
    free, allowed = free_memory(device), limits.get(device)
    return allowed if free is None else free if allowed is None else min(allowed, free)


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an allocation failed."""
    # Check the message too: on the CPU, and for pinned memory, torch raises a plain RuntimeError.
    phrases = ("can't allocate memory", "out of memory")
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in phrases)


def parse_bytes(size: int | str, called: str = "memory") -> int:
    """Return a size in bytes, from a number of bytes or accelerate's notation ("8GiB", "500MB")."""
    n_bytes: float = size if type(size) is int else -1
    # In any case, as for accelerate, but for "500mb": accelerate reads bits, and users mean bytes.
    if match := re.fullmatch(r"\s*(\d+\.?\d*)\s*([KMGTkmgt])(?:([Ii])[Bb]|B)\s*", str(size)):
        base = 1024 if match[3] else 1000
        n_bytes = float(match[1]) * base ** _PREFIXES.index(match[2].upper())
    if n_bytes < 0:
        raise ValueError(
            f"{called} must be bytes as an int, or a text such as '20GiB' or '500MB' with a "
            f"capital B, but is {shown(size)}"
        )
    return int(n_bytes)


def gib(size: float) -> str:
    """Format a size in bytes: "1.25 GiB", "640.0 KiB", "12 bytes", "-7.30 GiB"."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20)):
        if abs(size) >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size / 2**10:.1f} KiB" if abs(size) >= 2**10 else f"{size:.0f} bytes"


def format_table(rows: Sequence[Sequence[str]], sides: str) -> str:
    """Format rows as lines, with each column as wide as its widest cell.

    Args:
        rows: the cells of each row; the first row has the headings.
        sides: "<" or ">" for each column; the last one also applies to all further columns.

    >>> print(format_table([("device", "held"), ("cuda:0", "9.00 GiB")], "<>"))
    device      held
    cuda:0  9.00 GiB
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = sides.ljust(len(widths), sides[-1])
    lines = (
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths))
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)

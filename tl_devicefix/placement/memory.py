"""How much memory each device may use, and when an allocation has failed."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tl_devicefix.placement.devices import DeviceLike, free_memory, resolve
from tl_devicefix.simulation.machine import bytes_of

MaxMemory = Mapping[DeviceLike, int | str]
"""Device (or its index) -> most bytes to use there, as accelerate writes it: {0: "20GiB"}."""


Limits = Mapping[torch.device | str, int]
"""The same with each device by its full name, and sizes in bytes; "disk" has none."""


def by_device(max_memory: MaxMemory | Limits | None, home: torch.device) -> Limits | None:
    """`max_memory` so that it may be read without a home.

    Args:
        max_memory: as the user gives it.
        home: an index is that of a device of its type.

    Raises:
        ValueError: if there is no such device, or a size cannot be read.
    """
    if max_memory is None:
        return None
    if not isinstance(max_memory, Mapping):
        raise ValueError(
            "max_memory must be a dict from devices to sizes, such as {0: '20GiB', 1: '40GiB'}, "
            f"but is {max_memory!r}"
        )
    limits: dict[torch.device | str, int] = {}
    for key, limit in max_memory.items():
        if key == "disk":
            limits["disk"] = 0
            continue
        named = resolve(key, home)
        limits.setdefault(named, bytes_of(limit, f"max_memory[{key!r}]"))
    return limits


def capacity(device: torch.device, limits: Limits | None) -> int | None:
    """Bytes that may be used on `device`: what is free, and no more than the user allows."""
    free, allowed = free_memory(device), (limits or {}).get(device)
    return allowed if free is None else free if allowed is None else min(allowed, free)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: not everywhere does torch raise an error of a type of its own.

    On the CPU, and where host memory cannot be pinned, it is a RuntimeError by its type.
    """
    said = ("can't allocate memory", "out of memory")
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in said)

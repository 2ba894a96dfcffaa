"""Whether a placement fits into its devices' memory, and what would fit if it does not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from tl_devicefix.placement.balance import balanced, fits
from tl_devicefix.placement.devices import (
    HOST,
    all_from,
    free_memory,
    named_in_full,
    printed,
)
from tl_devicefix.placement.memory import (
    Limits,
    MaxMemory,
    by_device,
    capacity,
    gib,
    is_out_of_memory,
)
from tl_devicefix.placement.placement import Placement
from tl_devicefix.weight_processing import slices


def working_room(placement: Placement, dtype: torch.dtype) -> int:
    """Bytes that loading takes on a device beside the weights: a slice, in float32 and changing."""
    largest = max(component.weights for component in placement.components) // dtype.itemsize
    return 2 * 4 * min(largest, slices.ELEMENTS_ON_DEVICE)


def check_fit(placement: Placement, max_memory: MaxMemory | None, dtype: torch.dtype) -> None:
    """Check that each device has room for its share, and the host for offloaded blocks."""
    limits = by_device(max_memory, placement.home)
    for device in placement.memories:
        needed, room = placement.bytes_on(device), capacity(device, limits)
        if room is not None and needed > room:
            if device == HOST != placement.home:
                raise ValueError(
                    f"the weights do not fit: blocks of {gib(needed)} would be offloaded, but "
                    f"max_memory allows {gib(room)} on 'cpu'; raise that, or use more or larger "
                    "devices, a smaller dtype or first_n_layers"
                )
            raise ValueError(
                f"the weights do not fit: {printed(device)} would hold {gib(needed)} but has "
                f"{gib(room)} to use; "
                f"{remedy(placement, limits, dtype, working_room(placement, dtype))}"
            )


def remedy(
    placement: Placement,
    limits: Limits | None,
    dtype: torch.dtype,
    headroom: int = 0,
    given_back: Mapping[torch.device, int] | None = None,
) -> str:
    """Name a change that would fit, to end a sentence: more devices, or a smaller dtype.

    Args:
        placement: the one that does not fit.
        limits: the user's `max_memory`, by device.
        dtype: the dtype that the placement's weights are weighed in.
        headroom: bytes to leave on each device.
        given_back: bytes on each device that are in use now, and will not be.
    """
    home, sizes = placement.home, placement.components
    needed = {device: placement.bytes_on(device) + headroom for device in placement.devices}
    free_now = [free_memory(device) for device in needed]
    if limits and all(
        free is not None and size <= free for free, size in zip(free_now, needed.values())
    ):
        larger_limits = ", ".join(
            f"{named_in_full(d)}: {gib(1.01 * size)}" for d, size in needed.items()
        )
        return f"more is free: a larger max_memory would fit ({larger_limits})"

    def room_on(device: torch.device) -> int | None:
        room = capacity(device, limits)
        return None if room is None else room + (given_back or {}).get(device, 0)

    halved = [replace(c, weights=c.weights // 2) for c in sizes]
    first = torch.device(home.type) if home.index is None else torch.device(home.type, 0)
    starts = sorted(all_from(first), key=lambda device: device != home)
    for components in (sizes, halved) if dtype.itemsize == 4 else (sizes,):
        for start in starts:
            rooms = [room_on(device) for device in all_from(start)]
            for n in range(1, len(rooms) + 1):
                counts = balanced(components, rooms[:n])
                if None not in rooms and fits(components, counts, rooms, headroom):
                    from_there = "" if start == home else f"device={named_in_full(start)!r}, "
                    in_16_bits = "" if components is sizes else ", dtype='bfloat16'"
                    return f"{from_there}n_devices={n}{in_16_bits} would fit"
    total = sum(placement.bytes_on(device) for device in placement.memories)
    rooms = [room_on(device) for device in starts]
    if None in rooms:
        return f"all of it is {gib(total)}: use a smaller dtype, more devices or first_n_layers"
    free = sum(room or 0 for room in rooms)
    offload = "" if HOST in placement.memories else ", or offload blocks: name 'cpu' in max_memory"
    return (
        f"all of it is {gib(total)}, and the {len(starts)} {home.type} device(s) here have "
        f"{gib(free)} to use: use more or larger devices, a smaller dtype or first_n_layers"
        f"{offload}"
    )


@contextlib.contextmanager
def naming_full_devices(model: Any, placement: Placement | None, unit: str) -> Iterator[None]:
    """Explain running out of memory while a unit is brought to its device, if that is planned."""
    try:
        yield
    except RuntimeError as error:
        if placement is None or not is_out_of_memory(error):
            raise
        raise _out_of_memory(error, model, placement, unit) from error


def _out_of_memory(
    error: BaseException, model: Any, placement: Placement, unit: str
) -> torch.OutOfMemoryError:
    dtype = model.cfg.dtype
    # torch names no device where the host is full, which it says in words of its own.
    on_device = isinstance(error, torch.OutOfMemoryError)
    device = placement.device_of(unit) if on_device else placement.stored_on(unit)
    held = dict.fromkeys(placement.memories, 0)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device in held:
            held[tensor.device] += tensor.nbytes
    reason = ". ".join(" ".join(str(error).split()).split(". ")[:3]).rstrip(".")
    return torch.OutOfMemoryError(
        f"{printed(device)} ran out of memory while {unit} was brought there: "
        f"{gib(held[device])} of the {gib(placement.bytes_on(device))} planned for it were there, "
        f"and no more would fit ({reason}); free memory that others hold "
        "there. With what is free now: "
        f"{remedy(placement, None, dtype, working_room(placement, dtype), held)}"
    )

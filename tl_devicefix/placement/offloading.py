"""Which blocks are offloaded to host memory, where the devices have no room for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tl_devicefix.placement.balance import block_weights, blocks_share, home_load
from tl_devicefix.placement.devices import HOST
from tl_devicefix.placement.memory import Limits, capacity

VISITING = 2
"""Offloaded blocks on a device at a time: the one that computes, and the next on its way."""

_FILLED = 0.9
"""How much of what is free to fill, where the user sets no limit: activations need the rest."""


@dataclass(frozen=True)
class Share:
    """The blocks that one device runs."""

    blocks: int
    offloaded: frozenset[int] = frozenset()
    """Which of them are offloaded, by their position among these blocks."""


def may_offload(home: torch.device, limits: Limits | None) -> bool:
    """Whether blocks may live in host memory: if `max_memory` names it, and home is elsewhere."""
    return home != HOST and HOST in (limits or {})


def rooms_to_fill(devices: Sequence[torch.device], limits: Limits | None) -> list[int | None]:
    """Bytes of each device that weights may fill, when there are more of them than room."""
    rooms = []
    for device in devices:
        room = capacity(device, limits)
        limited = device in (limits or {})
        rooms.append(room if room is None or limited else int(_FILLED * room))
    return rooms


def shares(sizes: Sequence[Any], rooms: Sequence[int | None]) -> list[Share]:
    """The blocks that each device runs, a contiguous range each, as few of them offloaded as fit.

    Where that leaves a choice, devices have as many blocks as each other. Where nothing fits,
    every block is offloaded.

    Args:
        sizes: of the components.
        rooms: bytes for weights on each device; None is without end.
    """
    n_blocks = len(block_weights(sizes))
    block = max(block_weights(sizes), default=0)  # those of one model weigh the same
    shared = blocks_share(sizes)
    # best[i] = (offloaded, sums of squares, shares) of the devices so far, which run blocks 0..i-1
    best: dict[int, tuple[int, int, int, list[Share]]] = {0: (0, 0, 0, [])}
    for position, room in enumerate(rooms):
        reached: dict[int, tuple[int, int, int, list[Share]]] = {}
        at_home = home_load(sizes) if position == 0 else 0
        left = None if room is None else room - at_home
        for start, (offloaded, uneven_visits, uneven, before) in best.items():
            for end in range(start, n_blocks + 1):
                visitors = _to_offload(end - start, block, shared, left)
                if visitors is None:
                    break
                candidate = (
                    offloaded + visitors,
                    uneven_visits + visitors**2,
                    uneven + (end - start) ** 2,
                )
                if end not in reached or candidate < reached[end][:3]:
                    share = Share(end - start, interleaved(end - start, visitors))
                    reached[end] = (*candidate, [*before, share])
        best = reached
    if n_blocks in best:
        return best[n_blocks][3]
    return [Share(n_blocks, interleaved(n_blocks, n_blocks)), *(Share(0) for _ in rooms[1:])]


def _to_offload(count: int, block: int, shared: int, room: int | None) -> int | None:
    """How many of a device's blocks to offload for the rest to fit; None if nothing fits.

    Args:
        count: how many blocks it runs.
        block: what each weighs.
        shared: what they hold together, however many they are.
        room: what the device has for all that.
    """
    if room is None or (count * block + shared if count else 0) <= room:
        return 0
    residents = (room - shared) // block - VISITING if count else -1
    return None if residents < 0 else count - residents


def interleaved(count: int, offloaded: int) -> frozenset[int]:
    """Positions of so many offloaded blocks among `count`, evenly, so that all have time to come.

    >>> sorted(interleaved(6, 2))
    [2, 5]
    """
    return frozenset((i + 1) * count // offloaded - 1 for i in range(offloaded))

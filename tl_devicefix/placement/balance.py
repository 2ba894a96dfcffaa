"""Which blocks each device runs, in contiguous ranges, and which of them are offloaded."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tl_devicefix.placement.placement import (
    VISITING,
    ComponentSize,
    names_block,
    shared_buffer_bytes,
)

_Cost = TypeVar("_Cost", bound=tuple[object, ...])
"""Tuples compare entry by entry, so each entry breaks the ties of those before it."""

Rooms = Sequence[int | None]
"""Bytes that may be used on each device, home first; None means unlimited."""


@dataclass(frozen=True)
class Share:
    """The blocks that one device runs."""

    blocks: int
    offloaded: frozenset[int] = frozenset()
    """Which of them are offloaded, by their position among these blocks."""


def _weigh(sizes: Sequence[ComponentSize]) -> tuple[list[int], int, int]:
    """Weigh each block, the buffers that blocks on one device share, and the rest, in bytes."""
    blocks = [size for size in sizes if names_block(size.name)]
    around = (size.weights + size.buffers for size in sizes if not names_block(size.name))
    return [block.weights for block in blocks], shared_buffer_bytes(blocks), sum(around)


def balanced(sizes: Sequence[ComponentSize], rooms: Rooms) -> list[int]:
    """Return the number of blocks of each device, so that the fullest device is least full.

    Fullness is relative to a device's room. Ties are broken by the next fullest device, and so on.
    Each device gets a block if there are enough, unless the model only fits otherwise.
    """
    counts = _least_full(sizes, rooms, at_least=1)
    if fits(sizes, counts, rooms):
        return counts
    # Home may have room for the embeddings only, or a device for no block.
    sparse = _least_full(sizes, rooms, at_least=0)
    return sparse if fits(sizes, sparse, rooms) else counts


def _least_full(sizes: Sequence[ComponentSize], rooms: Rooms, at_least: int) -> list[int]:
    blocks, shared, at_home = _weigh(sizes)
    # With `at_least`, use no more devices than blocks. Else any device may get none.
    n_used = min(len(rooms), max(len(blocks), 1)) if at_least else len(rooms)
    # A device without a limit has room for everything.
    largest = max(1, sum(blocks) + shared + at_home, *(room or 0 for room in rooms))
    divisors = [float(largest if room is None else room) or 1.0 for room in rooms]
    prefix = list(itertools.accumulate(blocks, initial=0))

    def fullness(position: int, start: int, end: int) -> float:
        held = prefix[end] - prefix[start] + (shared if end > start else 0)
        return (held + (0 if position else at_home)) / divisors[position]

    # With equal numbers of blocks, the fullest device is this full: no device need be fuller.
    ends = [len(blocks) * n // n_used for n in range(n_used + 1)]
    enough = max(map(fullness, range(n_used), ends, ends[1:]))
    at_most = None
    if smallest := min(blocks, default=0):
        at_most = [int(enough * divisor) // smallest + 1 for divisor in divisors]

    def extend(
        fullest: tuple[float, ...], position: int, start: int, end: int, best: tuple[float, ...]
    ) -> tuple[float, ...] | None:
        full = fullness(position, start, end)
        if best and max(full, *fullest[:1]) > best[0]:
            return None  # before sorting: most splits end here
        return tuple(sorted((*fullest, full), reverse=True))

    nothing: tuple[float, ...] = ()
    counts = _best_ranges(len(blocks), n_used, nothing, extend, at_least, at_most)
    return [*(counts or []), *[0] * (len(rooms) - n_used)]


def _best_ranges(
    n_blocks: int,
    n_devices: int,
    nothing: _Cost,
    extend: Callable[[_Cost, int, int, int, _Cost | tuple[()]], _Cost | None],
    at_least: int = 0,
    at_most: Sequence[int] | None = None,
) -> list[int] | None:
    """Find the cheapest number of blocks of each device, by dynamic programming.

    Args:
        n_blocks: blocks of the model.
        n_devices: devices in order.
        nothing: the cost of no devices.
        extend: called with the cost of the devices before, a device's position, its first block,
            the block after its last, and the best cost so far of getting there, () at first.
            Returns the cost with this device, or None if that is impossible or not better.
        at_least: blocks that each device must have.
        at_most: the most blocks that each device may have.

    Returns:
        The counts; None if none are possible.
    """
    # The block after the last one placed -> the least cost of getting there, and its counts.
    best: dict[int, tuple[_Cost, list[int]]] = {0: (nothing, [])}
    for position in range(n_devices):
        reached: dict[int, tuple[_Cost, list[int]]] = {}
        last = n_blocks - at_least * (n_devices - 1 - position)
        for start, (before, counts) in best.items():
            longest = last if at_most is None else min(last, start + at_most[position])
            for end in range(min(start + at_least, n_blocks), longest + 1):
                lowest = reached[end][0] if end in reached else ()
                cost = extend(before, position, start, end, lowest)
                # `<`, not `<=`: the first of a tie has the fewest blocks before `start`, so the
                # first devices get the fewest.
                if cost is not None and (not lowest or cost < lowest):
                    reached[end] = cost, [*counts, end - start]
        best = reached
    return best[n_blocks][1] if n_blocks in best else None


def filled_in_order(sizes: Sequence[ComponentSize], rooms: Rooms) -> list[int]:
    """Fill each device before the next one; the last gets the remaining blocks."""
    remaining, shared, at_home = _weigh(sizes)
    counts = []
    for position, room in enumerate(rooms):
        used, count = shared + (0 if position else at_home), 0
        while remaining and (room is None or used + remaining[0] <= room):
            used += remaining.pop(0)
            count += 1
        counts.append(count)
    counts[-1] += len(remaining)
    return counts


def fits(sizes: Sequence[ComponentSize], counts: Sequence[int], rooms: Rooms) -> bool:
    """Return True if there is room for these numbers of blocks on the devices."""
    blocks, shared, at_home = _weigh(sizes)
    ends = list(itertools.accumulate(counts))
    loads = [sum(blocks[end - n : end]) + (shared if n else 0) for n, end in zip(counts, ends)]
    loads[0] += at_home
    return all(room is None or load <= room for load, room in zip(loads, rooms))


def shares(
    sizes: Sequence[ComponentSize], rooms: Rooms, may_offload: Sequence[bool]
) -> list[Share]:
    """Return the blocks that each device runs, with as few offloaded as possible.

    Ties go to equal numbers of offloaded blocks, then of blocks. If no split fits, home gets
    all blocks, all offloaded.
    """
    blocks, shared, at_home = _weigh(sizes)
    block = max(blocks, default=0)  # as if all blocks weighed the same
    left = [
        None if room is None else room - (0 if position else at_home)
        for position, room in enumerate(rooms)
    ]

    def extend(
        cost: tuple[int, int, int], position: int, start: int, end: int, _best: object
    ) -> tuple[int, int, int] | None:
        n_offloaded = _to_offload(end - start, block, shared, left[position])
        if n_offloaded is None or (n_offloaded and not may_offload[position]):
            return None
        # A sum of squares is least where all devices have the same number.
        offloaded, squares_of_offloaded, squares = cost
        squares += (end - start) ** 2
        return offloaded + n_offloaded, squares_of_offloaded + n_offloaded**2, squares

    counts = _best_ranges(len(blocks), len(rooms), (0, 0, 0), extend)
    if counts is None:
        return [Share(len(blocks), frozenset(range(len(blocks)))), *(Share(0) for _ in rooms[1:])]
    return [
        Share(count, _spread_out(count, _to_offload(count, block, shared, room) or 0))
        for count, room in zip(counts, left)
    ]


def _to_offload(count: int, block: int, shared: int, room: int | None) -> int | None:
    """Return how many of a device's blocks to offload so that the rest fits; None if never."""
    if room is None or (count * block + shared if count else 0) <= room:
        return 0
    # Leave room for the VISITING offloaded blocks that are there at a time.
    residents = (room - shared) // block - VISITING if count else -1
    return None if residents < 0 else count - residents


def _spread_out(count: int, offloaded: int) -> frozenset[int]:
    """Spread offloaded blocks evenly over `count` positions: {2, 5} for 2 of 6."""
    return frozenset((i + 1) * count // offloaded - 1 for i in range(offloaded))

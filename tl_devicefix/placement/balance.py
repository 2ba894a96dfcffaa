"""How many blocks each device gets: contiguous ranges, as full as each other."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from tl_devicefix.placement.components import is_block, shared_once


def block_weights(sizes: Sequence[Any]) -> list[int]:
    """Bytes that each block adds to its device."""
    return [size.weights for size in sizes if is_block(size.name)]


def blocks_share(sizes: Sequence[Any]) -> int:
    """Bytes that the blocks on a device hold together, if it has some of each kind."""
    return shared_once([size for size in sizes if is_block(size.name)])


def home_load(sizes: Sequence[Any]) -> int:
    """Bytes that home holds beside blocks."""
    return sum(size.weights + size.buffers for size in sizes if not is_block(size.name))


def balanced(sizes: Sequence[Any], capacities: Sequence[int | None]) -> list[int]:
    """Blocks per device so that the fullest device, relative to its capacity, is least full.

    Of several ways, the one with the next to fullest least full, and so on.

    No device is left without a block while there are enough, unless that is what makes it fit: a
    home that has room for the embeddings only, or a device with less than a block free.
    """
    counts = _least_full(sizes, capacities, at_least=1)
    if fits(sizes, counts, capacities):
        return counts
    sparse = _least_full(sizes, capacities, at_least=0)
    return sparse if fits(sizes, sparse, capacities) else counts


def _least_full(sizes: Sequence[Any], capacities: Sequence[int | None], at_least: int) -> list[int]:
    """By dynamic programming over contiguous ranges; of those, by the next to fullest, and so on.

    So a limit on one device changes no more of the others than it must.
    """
    blocks, shared, around = block_weights(sizes), blocks_share(sizes), home_load(sizes)
    n_used = min(len(capacities), max(len(blocks), 1))
    known = [c for c in capacities if c is not None]
    shares = [float(c if c is not None else max(known, default=1)) or 1.0 for c in capacities]
    prefix = list(itertools.accumulate(blocks, initial=0))
    # best[i] = (how full, fullest first; sum of squares; counts) of the devices so far, holding
    # blocks 0..i-1. Squares differ in rounding only: by it, plans among equals are what they were.
    best: dict[int, tuple[tuple[float, ...], float, list[int]]] = {0: ((), 0.0, [])}
    for position in range(n_used):
        home = around if position == 0 else 0
        reached: dict[int, tuple[tuple[float, ...], float, list[int]]] = {}
        last = len(blocks) - at_least * (n_used - 1 - position)
        for start, (fullest, squares, counts) in best.items():
            for end in range(min(start + at_least, len(blocks)), last + 1):
                held = prefix[end] - prefix[start] + (shared if end > start else 0)
                full = (held + home) / shares[position]
                if end in reached and max(full, *fullest[:1]) > reached[end][0][0]:
                    continue
                fuller = tuple(sorted((*fullest, full), reverse=True))
                candidate = (fuller, squares + full**2, [*counts, end - start])
                if end not in reached or candidate < reached[end]:
                    reached[end] = candidate
        best = reached
    return best[len(blocks)][2] + [0] * (len(capacities) - n_used)


def sequential(sizes: Sequence[Any], capacities: Sequence[int | None]) -> list[int]:
    """Blocks per device, each device filled to its capacity before the next is used."""
    remaining = block_weights(sizes)
    counts = []
    for position, capacity in enumerate(capacities):
        used = blocks_share(sizes) + (home_load(sizes) if position == 0 else 0)
        count = 0
        while remaining and (capacity is None or used + remaining[0] <= capacity):
            used += remaining.pop(0)
            count += 1
        counts.append(count)
    counts[-1] += len(remaining)  # what is left over is reported by `check_fit`
    return counts


def loads(sizes: Sequence[Any], counts: Sequence[int]) -> list[int]:
    """Bytes on each device that has so many blocks; the first is home."""
    blocks = iter(block_weights(sizes))
    shared = blocks_share(sizes)
    on_each = [
        sum(next(blocks) for _ in range(count)) + (shared if count else 0) for count in counts
    ]
    on_each[0] += home_load(sizes)
    return on_each


def fits(
    sizes: Sequence[Any],
    counts: Sequence[int],
    capacities: Sequence[int | None],
    headroom: int = 0,
) -> bool:
    """Whether so many blocks on each device leave `headroom` bytes of what it may use free."""
    rooms = (None if room is None else room - headroom for room in capacities)
    return all(room is None or load <= room for load, room in zip(loads(sizes, counts), rooms))

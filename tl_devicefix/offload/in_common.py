"""Offloaded blocks of runs in flight: what has been sent for one run is there for all of them.

Each run has a view of the model, and goes through its blocks by itself. Two blocks at a time are
on a device, as of one run alone. A block leaves when another needs the room, and one that some
run needs next leaves last.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from typing import Protocol

import torch

from tl_devicefix.offload.copying import wait_until_copied
from tl_devicefix.offload.sent import Sent
from tl_devicefix.placement.balance import VISITING

coming_and_going = threading.RLock()
"""Held while weights are sent or dropped, and while a block's parameters are exchanged."""

AT_HAND, THERE, NOT_THERE = range(3)
"""What a run needs next on a device: what was used last or nothing, what visits, another block."""


class Block(Protocol):
    """The forward of an offloaded block, of one view."""

    device: torch.device
    weights: object
    """The same object for the block of every view."""

    def send(self) -> Sent:
        """Send the weights on their way."""

    def is_current(self, sent: Sent) -> bool:
        """Whether these weights are still the block's."""


class Visits:
    """The blocks that visit devices, for all runs of one `pipeline_map`."""

    def __init__(self) -> None:
        self._there: dict[torch.device, dict[object, Sent]] = defaultdict(dict)
        self._running: Counter[object] = Counter()
        self._last: dict[torch.device, object] = {}
        self._tours: list[TourInCommon] = []  # those of older runs first, mostly

    def rank(self, device: torch.device, weights: object | None) -> int:
        """How soon a run should get a device, which needs these weights there, or none.

        Returns:
            `AT_HAND`, `THERE` or `NOT_THERE`, in this order.
        """
        if weights is None:
            return AT_HAND
        if weights not in self._there.get(device, ()):
            return NOT_THERE
        return AT_HAND if self._last.get(device) is weights else THERE

    def begin(self, tour: TourInCommon) -> None:
        """Count with what a tour needs."""
        self._tours.append(tour)
        for device in tour.devices:
            self.send_ahead(device)

    def end(self, tour: TourInCommon) -> None:
        """Count with a tour no more, and drop what no other needs soon."""
        self._tours.remove(tour)
        for device in tour.devices:
            for weights in self._unneeded(device, self._next(device, VISITING)):
                self._drop(device, weights)

    def arrival_of(self, block: Block) -> Sent:
        """The block's weights, which are sent if they are not there."""
        device, weights = block.device, block.weights
        sent = self._there[device].get(weights)
        if sent is None or not block.is_current(sent):
            if sent is not None:
                self._drop(device, weights)
            self._make_room(device)
            sent = self._there[device][weights] = block.send()
        else:
            sent.share()
        self._running[weights] += 1
        self._last[device] = weights
        try:
            self.send_ahead(device)
        except BaseException:
            self._running[weights] -= 1
            raise
        return sent

    def left(self, block: Block) -> None:
        """Count a run of the block as done."""
        self._running[block.weights] -= 1
        self.send_ahead(block.device)

    def send_ahead(self, device: torch.device) -> None:
        """Send what runs need soon, the oldest run first, as far as there is room."""
        there = self._there[device]
        needed = self._next(device)
        for tour in self._tours:
            coming = tour.coming_to(device)
            needed.update(block.weights for block in coming)
            for block in coming:
                if block.weights in there:
                    continue
                if len(there) >= VISITING:
                    unneeded = self._unneeded(device, needed)
                    if not unneeded:
                        return
                    self._drop(device, unneeded[0])
                there[block.weights] = block.send()

    def _make_room(self, device: torch.device) -> None:
        """Make room for a block that runs now, if need be of one that is needed next."""
        while len(self._there[device]) >= VISITING:
            idle = self._unneeded(device, set())
            if not idle:  # each runs, in a hook of which this block does, or a thread
                return
            of_next = self._next(device)
            self._drop(device, min(idle, key=lambda weights: weights in of_next))

    def _next(self, device: torch.device, count: int = 1) -> set[object]:
        """The blocks of which each is among the next of some run, so many of each."""
        return {block.weights for tour in self._tours for block in tour.coming_to(device)[:count]}

    def _unneeded(self, device: torch.device, needed: set[object]) -> list[object]:
        """The blocks there that neither run nor are needed."""
        there = self._there[device]
        return [each for each in there if each not in needed and not self._running[each]]

    def _drop(self, device: torch.device, weights: object) -> None:
        self._there[device].pop(weights).let_go()

    def clear(self) -> None:
        """Drop all, and wait until weights on the host may be changed."""
        with coming_and_going:
            for device, there in self._there.items():
                for weights in list(there):
                    self._drop(device, weights)
                wait_until_copied(device)


class TourInCommon:
    """The offloaded blocks that one forward will run, among those of other runs.

    Args:
        blocks: their forwards, in the order they run.
        visits: which the runs have in common.
        outer: the tour of the forward in a hook of which this one is.
    """

    def __init__(
        self, blocks: Iterable[Block], visits: Visits, outer: TourInCommon | None = None
    ) -> None:
        self._to_go: dict[torch.device, deque[Block]] = {}
        for block in blocks:
            self._to_go.setdefault(block.device, deque()).append(block)
        self.devices = tuple(self._to_go)
        self._visits = visits
        self._outer = outer
        self._inner = 0

    def begin(self) -> None:
        """Send for the first blocks of each device, as far as there is room."""
        with coming_and_going:
            if self._outer is not None:
                self._outer._inner += 1
            self._visits.begin(self)

    def coming_to(self, device: torch.device) -> list[Block]:
        """The blocks that it comes to next on a device; none while one of its hooks has a tour."""
        return [] if self._inner else list(self._to_go.get(device, ()))[:VISITING]

    def arrival_of(self, block: Block) -> Sent:
        """The block's weights, which may have been sent before."""
        with coming_and_going:
            to_go = self._to_go.get(block.device, deque())
            if block in to_go:  # and those before it were passed over
                while to_go.popleft() is not block:
                    pass
            return self._visits.arrival_of(block)

    def left(self, block: Block) -> None:
        """Count the block as done."""
        with coming_and_going:
            self._visits.left(block)

    def end(self) -> None:
        """Drop what nobody needs any more."""
        with coming_and_going:
            if self._outer is not None:
                self._outer._inner -= 1
            self._visits.end(self)

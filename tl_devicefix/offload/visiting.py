"""Offloaded blocks: their weights live in host memory and visit a device while the block runs.

While one block computes, the weights of the next one are on their way: two blocks at a time are on
a device. A weight is read where the block runs, and is the host's own parameter again afterwards,
also after an error; its gradient arrives at the host's parameter.

    computes     block 0      block 1      block 2
    is copied    block 1 ->   block 2 ->   block 3 ->
    is there     0, 1         1, 2         2, 3

`Schedule` has the order in which a forward will run its blocks, and `Visits` what is on which
device: of one forward, or of all runs of a `pipeline_map`, for which a block is copied once. A
block that is run by itself, or out of order as in a hook, is copied as it is run.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from tl_devicefix.around import Args, Around, Forward, Kwargs
from tl_devicefix.offload.copying import (
    Sent,
    Visitor,
    keeping_on_host,
    module_with_streams,
    wait_until_copied,
)
from tl_devicefix.placement.devices import HOST
from tl_devicefix.placement.in_use import setting
from tl_devicefix.placement.placement import VISITING, Placement

# Held while weights are sent or dropped, and while a block's parameters are exchanged.
_exchanging = threading.RLock()


def offload_blocks(model: Any, placement: Placement) -> None:
    """Have each offloaded block's weights visit its device when it runs."""
    for block, device in _offloaded_blocks(model, placement):
        OffloadedForward(block, device).attach(block)
    pin(model, placement)


def pin(model: Any, placement: Placement) -> None:
    """Pin the weights of offloaded blocks, where that lets them be copied during a computation."""
    for block, device in _offloaded_blocks(model, placement):
        if module_with_streams(device) is not None:
            for parameter in block.parameters():
                if parameter.device == HOST and not parameter.is_pinned():
                    parameter.data = parameter.data.pin_memory()


def _offloaded_blocks(model: Any, placement: Placement) -> Iterator[tuple[nn.Module, torch.device]]:
    for component in placement.components:
        if component.offloaded:
            yield model.get_submodule(component.name), component.device


class OffloadedForward(Around):
    """Brings an offloaded block's weights to the device where it runs, and takes them away."""

    def __init__(self, block: nn.Module, device: torch.device) -> None:
        self.module = block
        self.device = device
        self.weights = object()
        """Stands for the block's weights, also in the forwards of views' blocks."""
        self._runs = 0  # a hook, or another thread, may run the block while it runs
        self._visitors: list[Visitor] = []
        self._sent: Sent | None = None  # what they came with
        self._schedule: Schedule | None = None  # for which they came

    def forward(self, module: nn.Module, run: Forward, args: Args, kwargs: Kwargs) -> Any:
        """Run the block's own forward; called by itself, it has a schedule of its own."""
        of_forward = _schedule.get()
        of_block = (
            _sending_ahead([self]) if of_forward is None else contextlib.nullcontext(of_forward)
        )
        with of_block as schedule:
            self._receive(schedule)
            try:
                with keeping_on_host(self._visitors):
                    return run(*args, **kwargs)
            finally:
                self._leave()

    def send(self) -> Sent:
        """Send the block's weights on their way, as they are now."""
        with _exchanging:
            return Sent((host for *_, host in self._on_host()), self.device)

    def is_current(self, sent: Sent) -> bool:
        """Whether these weights are still the block's, as they are now."""
        with _exchanging:
            return sent.is_current([host for *_, host in self._on_host()])

    def _on_host(self) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
        """Each parameter that lives on the host, also while the block runs for someone else."""
        visited = {id(visitor.weight): visitor.host for visitor in self._visitors}
        for module in self.module.modules():
            for name, parameter in module._parameters.items():
                host = visited.get(id(parameter), parameter)
                if host is not None and host.device == HOST:
                    yield module, name, host

    # In functions of their own, as names in the caller's frame would hold weights that have left.

    def _receive(self, schedule: Schedule) -> None:
        with _exchanging:
            if not self._runs:
                self._sent, self._schedule = schedule.arrival_of(self), schedule
                self._visitors = self._sent.arrive(self._on_host())
                for visitor in self._visitors:
                    visitor.move_in()
            elif self._sent is not None:
                self._sent.share()
            self._runs += 1

    def _leave(self) -> None:
        """Have the weights leave, unless the block still runs for someone else."""
        with _exchanging:
            self._runs -= 1
            if self._runs:
                return
            for visitor in self._visitors:
                visitor.move_out()
            schedule, self._schedule = self._schedule, None
            self._visitors, self._sent = [], None
            if schedule is not None:
                schedule.visits.left(self)


class Visits:
    """The blocks that visit devices, two at a time on each: of one forward, or of `pipeline_map`.

    A block leaves when another needs the room, and one that some run needs next leaves last.
    """

    def __init__(self) -> None:
        self._visiting: dict[torch.device, dict[object, Sent]] = defaultdict(dict)
        self._running: Counter[object] = Counter()
        self._last: dict[torch.device, object] = {}
        self.schedules: list[Schedule] = []  # those of older runs first, mostly

    def rank(self, device: torch.device, weights: object | None) -> int:
        """How soon a run gets a device: 0 if it needs the block used last, or none; 1 if another
        that visits; 2 if one that does not.
        """
        if weights is None:
            return 0
        if weights not in self._visiting.get(device, ()):
            return 2
        return 0 if self._last.get(device) is weights else 1

    def begin(self, schedule: Schedule) -> None:
        """Add a forward's schedule, whose blocks are needed from now on."""
        with _exchanging:
            self.schedules.append(schedule)
            for device in schedule.to_go:
                self.send_ahead(device)

    def end(self, schedule: Schedule) -> None:
        """Remove one, and drop weights that no other schedule needs soon."""
        with _exchanging:
            self.schedules.remove(schedule)
            for device in list(self._visiting):
                self._drop_unneeded(device)

    def arrival_of(self, block: OffloadedForward) -> Sent:
        """The block's weights, which are sent if they are not there."""
        device, weights = block.device, block.weights
        sent = self._visiting[device].get(weights)
        if sent is None or not block.is_current(sent):
            if sent is not None:
                self._drop(device, weights)
            self._make_room(device)
            sent = self._visiting[device][weights] = block.send()
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

    def left(self, block: OffloadedForward) -> None:
        """Count a run of the block as done."""
        self._running[block.weights] -= 1
        self.send_ahead(block.device)
        if len(self.schedules) == 1:
            self._drop_unneeded(block.device)

    def send_ahead(self, device: torch.device) -> None:
        """Send what runs need soon, the oldest run first, as far as there is room."""
        visiting = self._visiting[device]
        needed = self._next(device)
        for schedule in self.schedules:
            coming = schedule.coming_to(device)
            needed.update(block.weights for block in coming)
            for block in coming:
                if block.weights in visiting:
                    continue
                if len(visiting) >= VISITING:
                    unneeded = self._unneeded(device, needed)
                    if not unneeded:
                        return
                    self._drop(device, unneeded[0])
                visiting[block.weights] = block.send()

    def _make_room(self, device: torch.device) -> None:
        """Make room for a block that runs now, if need be of one that is needed next."""
        while len(self._visiting[device]) >= VISITING:
            idle = self._unneeded(device, set())
            if not idle:  # each runs, in a hook of which this block does, or a thread
                return
            of_next = self._next(device)
            self._drop(device, min(idle, key=lambda weights: weights in of_next))

    def _next(self, device: torch.device, count: int = 1) -> set[object]:
        """The next `count` blocks of every run."""
        return {
            block.weights
            for schedule in self.schedules
            for block in schedule.coming_to(device)[:count]
        }

    def _unneeded(self, device: torch.device, needed: set[object]) -> list[object]:
        """Blocks on the device that neither run nor are needed."""
        visiting = self._visiting[device]
        return [
            weights for weights in visiting if weights not in needed and not self._running[weights]
        ]

    def _drop_unneeded(self, device: torch.device) -> None:
        for weights in self._unneeded(device, self._next(device, VISITING)):
            self._drop(device, weights)

    def _drop(self, device: torch.device, weights: object) -> None:
        self._visiting[device].pop(weights).let_go()

    def clear(self) -> None:
        """Drop all, and wait until weights on the host may be changed."""
        with _exchanging:
            for device, visiting in self._visiting.items():
                for weights in list(visiting):
                    self._drop(device, weights)
        self.wait()

    def wait(self) -> None:
        """Wait until weights on the host may be changed."""
        for device in list(self._visiting):
            wait_until_copied(device)


class Schedule:
    """The offloaded blocks that one forward will run: each is sent as soon as there is room."""

    def __init__(
        self, blocks: Iterable[OffloadedForward], visits: Visits, outer: Schedule | None = None
    ) -> None:
        self.to_go: dict[torch.device, deque[OffloadedForward]] = {}
        for block in blocks:
            self.to_go.setdefault(block.device, deque()).append(block)
        self.visits, self._outer = visits, outer

    def coming_to(self, device: torch.device) -> list[OffloadedForward]:
        """The blocks that come next on a device; none while a forward runs in one of its hooks."""
        if any(schedule._outer is self for schedule in self.visits.schedules):
            return []
        return list(self.to_go.get(device, ()))[:VISITING]

    def arrival_of(self, block: OffloadedForward) -> Sent:
        """The block's weights, which may have been sent before."""
        with _exchanging:
            to_go = self.to_go.get(block.device, deque())
            if block in to_go:  # and those before it were passed over
                while to_go.popleft() is not block:
                    pass
            return self.visits.arrival_of(block)


_schedule: ContextVar[Schedule | None] = ContextVar("schedule", default=None)
_in_common: ContextVar[Visits | None] = ContextVar("visits", default=None)


@contextlib.contextmanager
def sharing_visits(visits: Visits) -> Iterator[None]:
    """Within it, this thread's forwards share the visiting weights of `visits`."""
    with setting(_in_common, visits), setting(_schedule, None):
        yield


def visiting_weights(block: nn.Module) -> object | None:
    """The key of an offloaded block's weights; None for any other module."""
    visits = OffloadedForward.of(block)
    return None if visits is None else visits.weights


def sending_ahead(
    model: Any, start_at_layer: int | None, stop_at_layer: int | None
) -> contextlib.AbstractContextManager[Schedule]:
    """Within it, a forward runs these blocks; the offloaded ones are sent ahead."""
    blocks = list(getattr(model, "blocks", ()))[start_at_layer:stop_at_layer]
    return _sending_ahead(filter(None, map(OffloadedForward.of, blocks)))


@contextlib.contextmanager
def _sending_ahead(blocks: Iterable[OffloadedForward]) -> Iterator[Schedule]:
    in_common, outer = _in_common.get(), _schedule.get()
    visits = outer.visits if outer is not None else in_common or Visits()
    schedule = Schedule(blocks, visits, outer)
    try:
        with setting(_schedule, schedule):
            visits.begin(schedule)
            yield schedule
    finally:
        visits.end(schedule)
        if in_common is None:
            visits.wait()

"""Offloaded blocks: their weights live in host memory and visit a device while the block runs.

While one block computes, the weights of the next one are on their way: two blocks at a time are on
a device. A weight is read where the block runs, and is the host's own parameter again afterwards,
also after an error; its gradient arrives at the host's parameter.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from tl_devicefix.offload.copying import copies_beside_computing, wait_until_copied
from tl_devicefix.offload.in_common import TourInCommon, Visits, coming_and_going
from tl_devicefix.offload.kept_weights import keeping_on_host
from tl_devicefix.offload.sent import Sent, Visitor
from tl_devicefix.placement.balance import VISITING
from tl_devicefix.placement.devices import HOST
from tl_devicefix.placement.placement import Placement


def let_visit(model: Any, placement: Placement) -> None:
    """Have each offloaded block's weights visit its device when it runs."""
    for block, device in _offloaded_blocks(model, placement):
        # Not by setattr, which the components of a Bridge hand on to what they wrap.
        vars(block)["forward"] = ForwardWithVisitors(block, device)
    pin(model, placement)


def let_stay(model: Any) -> None:
    """Undo `let_visit`."""
    for block in getattr(model, "blocks", ()):
        run = vars(block).get("forward")
        if isinstance(run, ForwardWithVisitors):
            del vars(block)["forward"]
            if run.own is not None:
                vars(block)["forward"] = run.own


def pin(model: Any, placement: Placement) -> None:
    """Pin the weights of offloaded blocks, where that lets them be copied during a computation."""
    for block, device in _offloaded_blocks(model, placement):
        if copies_beside_computing(device):
            for parameter in block.parameters():
                if parameter.device == HOST and not parameter.is_pinned():
                    parameter.data = parameter.data.pin_memory()


def _offloaded_blocks(model: Any, placement: Placement) -> Iterator[tuple[nn.Module, torch.device]]:
    for component in placement.components:
        if component.offloaded:
            yield model.get_submodule(component.name), component.device


class ForwardWithVisitors:
    """An offloaded block's forward: with its weights on the device where it runs.

    Args:
        block: the block, whose forward this replaces.
        device: where it runs.
    """

    def __init__(self, block: nn.Module, device: torch.device) -> None:
        self.own = vars(block).get("forward")
        """The forward of this very block, if that is not its class's."""
        self.device = device
        self._block = block
        self.weights = object()
        """Stands for the block's weights, also in the forwards of views' blocks."""
        self._runs = 0  # a hook, or another thread, may run the block while it runs
        self._visitors: list[Visitor] = []
        self._sent: Sent | None = None  # what they came with

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block's own forward."""
        block = self._block
        forward = self.own or type(block).forward.__get__(block)
        with self._received(_current_tour()), self._keeping_on_host():
            return forward(*args, **kwargs)

    def _keeping_on_host(self) -> contextlib.AbstractContextManager[Any]:
        weights = [(visitor.there, visitor.host) for visitor in self._visitors]
        return keeping_on_host(weights, self.device)

    def send(self) -> Sent:
        """Send the block's weights on their way, as they are now."""
        with coming_and_going:
            return Sent((host for *_, host in self._on_host()), self.device)

    def is_current(self, sent: Sent) -> bool:
        """Whether these weights are still the block's, as they are now."""
        with coming_and_going:
            return sent.is_current([host for *_, host in self._on_host()])

    def leave_to(self, view: ForwardWithVisitors) -> None:
        """Have the forward of a view's block begin at rest, though this one may be running."""
        with coming_and_going:
            modules = dict(zip(self._block.modules(), view._block.modules()))
            for module, name, host in self._on_host():
                modules[module]._parameters[name] = host  # type: ignore[assignment]
            view._runs, view._visitors, view._sent = 0, [], None

    def _on_host(self) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
        """Each parameter that lives on the host, also while the block runs for someone else."""
        visited = {id(visitor.there): visitor.host for visitor in self._visitors}
        for module in self._block.modules():
            for name, parameter in module._parameters.items():
                host = visited.get(id(parameter), parameter)
                if host is not None and host.device == HOST:
                    yield module, name, host

    @contextlib.contextmanager
    def _received(self, tour: Tour | TourInCommon | None) -> Iterator[None]:
        # In functions of their own, as names in this frame would hold weights that have left.
        self._receive(tour)
        try:
            yield
        finally:
            has_left = self._see_off()
            if tour is None:
                wait_until_copied(self.device)
            elif has_left or isinstance(tour, Tour):
                tour.left(self)

    def _receive(self, tour: Tour | TourInCommon | None) -> None:
        with coming_and_going:
            if not self._runs:
                self._sent = self.send() if tour is None else tour.arrival_of(self)
                self._visitors = self._sent.arrive(self._on_host())
                for visitor in self._visitors:
                    visitor.move_in()
            elif self._sent is not None:
                self._sent.share()
            self._runs += 1

    def _see_off(self) -> bool:
        """Have the weights leave, unless the block still runs for someone else."""
        with coming_and_going:
            self._runs -= 1
            if not self._runs:
                for visitor in self._visitors:
                    visitor.move_out()
                self._visitors, self._sent = [], None
            return not self._runs


class Tour:
    """The offloaded blocks that one forward will run: each is sent as soon as there is room.

    Args:
        blocks: their forwards, in the order they run.
    """

    def __init__(self, blocks: Iterable[ForwardWithVisitors]) -> None:
        self._to_send: dict[torch.device, deque[ForwardWithVisitors]] = {}
        for block in blocks:
            self._to_send.setdefault(block.device, deque()).append(block)
        self._sent: dict[ForwardWithVisitors, Sent] = {}
        self._there: set[ForwardWithVisitors] = set()  # on their way or arrived
        self._devices: set[torch.device] = set()

    def begin(self) -> None:
        """Send for the first blocks of each device."""
        for device in self._to_send:
            self._fill(device)

    def arrival_of(self, block: ForwardWithVisitors) -> Sent:
        """The block's weights, which were sent before if it is this block's turn."""
        if block in self._sent and block.is_current(self._sent[block]):
            return self._sent.pop(block)
        self._drop(block)
        if block in self._to_send.get(block.device, ()):
            self._to_send[block.device].remove(block)
        return self._send(block)

    def left(self, block: ForwardWithVisitors) -> None:
        """Let the next one come, as the weights of this block are gone."""
        self._drop(block)
        self._there.discard(block)
        self._fill(block.device)

    def _fill(self, device: torch.device) -> None:
        to_send = self._to_send.get(device)
        while to_send and sum(block.device == device for block in self._there) < VISITING:
            block = to_send.popleft()
            self._sent[block] = self._send(block)

    def _send(self, block: ForwardWithVisitors) -> Sent:
        self._there.add(block)
        self._devices.add(block.device)
        return block.send()

    def _drop(self, block: ForwardWithVisitors) -> None:
        """Let go of what was sent in vain, as the block ran already, or was changed since."""
        if block in self._sent:
            self._sent.pop(block).let_go()

    def end(self) -> None:
        """Drop what was sent in vain, and wait until weights on the host may be changed."""
        self._to_send.clear()
        for block in list(self._sent):
            self._drop(block)
        for device in self._devices:
            wait_until_copied(device)


_tour: ContextVar[Tour | TourInCommon | None] = ContextVar("tour", default=None)
_visits: ContextVar[Visits | None] = ContextVar("visits", default=None)


def _current_tour() -> Tour | TourInCommon | None:
    """That of the forward that this thread runs; of a block by itself, the one of no other."""
    tour, visits = _tour.get(), _visits.get()
    return tour if tour is not None or visits is None else TourInCommon((), visits)


@contextlib.contextmanager
def visiting_in_common(visits: Visits) -> Iterator[None]:
    """Within it, blocks of this thread's forwards use what others have sent, and they its."""
    tokens = _visits.set(visits), _tour.set(None)
    try:
        yield
    finally:
        _visits.reset(tokens[0])
        _tour.reset(tokens[1])


def visiting_weights(block: nn.Module) -> object | None:
    """What stands for the weights of an offloaded block; None for any other module."""
    run = vars(block).get("forward")
    return run.weights if isinstance(run, ForwardWithVisitors) else None


@contextlib.contextmanager
def touring(model: Any, start_at_layer: int | None, stop_at_layer: int | None) -> Iterator[None]:
    """Within it, a forward runs these blocks, the offloaded ones of which are sent for in time."""
    blocks = list(getattr(model, "blocks", ()))[start_at_layer:stop_at_layer]
    runs = (vars(block).get("forward") for block in blocks)
    offloaded = [run for run in runs if isinstance(run, ForwardWithVisitors)]
    visits, outer = _visits.get(), _tour.get()
    tour: Tour | TourInCommon
    if visits is None:
        tour = Tour(offloaded)
    else:
        tour = TourInCommon(offloaded, visits, outer if isinstance(outer, TourInCommon) else None)
    token = _tour.set(tour)
    try:
        tour.begin()
        yield
    finally:
        _tour.reset(token)
        tour.end()

"""Runs in flight: which of them gives work to which device, and how one goes on to the next.

Each run is a thread, and holds the turn of the device where it computes. Where its residual stream
leaves for another device, it gives the turn back, waits until what it takes along has arrived, and
takes the other's turn. So a device gets the blocks of one run after those of another, and the
first is done in half the time that both together would take.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary


class Abandoned(BaseException):
    """Ends a run that nobody waits for any more. No Exception, as a run may catch these."""


class Turns:
    """The turns of the devices, among the runs of one `in_flight`. The oldest run goes first."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holders: dict[torch.device, Run] = {}
        self._waiting: dict[torch.device, list[Run]] = defaultdict(list)
        self._unfinished: set[int] = set()
        self._is_over = False

    def begin(self, number: int) -> None:
        """Count a run as not finished, before any later one may ask."""
        with self._changed:
            self._unfinished.add(number)

    def finish(self, number: int) -> None:
        """Count a run as finished."""
        with self._changed:
            self._unfinished.discard(number)
            self._changed.notify_all()

    def end(self) -> None:
        """Have every run end that has not finished."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def check(self) -> None:
        """Go on, unless nobody waits any more.

        Raises:
            Abandoned: then.
        """
        if self._is_over:
            raise Abandoned

    def take(self, run: Run, device: torch.device) -> None:
        """Wait until a device is free, and no older run waits for it.

        Raises:
            Abandoned: if nobody waits for the run any more.
        """
        with self._changed:
            waiting = self._waiting[device]
            waiting.append(run)
            try:
                while device in self._holders or run.number != min(each.number for each in waiting):
                    self.check()
                    self._changed.wait()
                self.check()
                self._holders[device] = run
            finally:
                waiting.remove(run)

    def give_back(self, device: torch.device) -> None:
        """Let the next run have a device."""
        with self._changed:
            del self._holders[device]
            self._changed.notify_all()

    def wait_for_earlier(self, number: int) -> None:
        """Wait until all runs before one have finished.

        Raises:
            Abandoned: if nobody waits for this one any more.
        """
        with self._changed:
            while min(self._unfinished) < number:
                self.check()
                self._changed.wait()


class Streams:
    """The streams of one view, a device each, on which tensors go from device to device."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}

    def of(self, device: torch.device) -> Any:
        """The one of a device."""
        if device not in self._streams:
            self._streams[device] = torch.get_device_module(device.type).Stream(device)
        return self._streams[device]


class Run:
    """One run of an `in_flight`, in the thread that runs it.

    Args:
        number: how many came before it.
        turns: of the devices.
        streams: its own, for what goes from device to device.

    Attributes:
        at: the device whose turn it holds, if any.
    """

    def __init__(self, number: int, turns: Turns, streams: Streams) -> None:
        self.number = number
        self.turns = turns
        self._streams = streams
        self.at: torch.device | None = None
        self._sent: list[torch.Tensor] | None = None  # on the way to the next device
        # Tensors that were computed when the host has last waited for a copy of theirs.
        self._computed = WeakIdKeyDictionary()

    @contextlib.contextmanager
    def going_to(self, device: torch.device) -> Iterator[None]:
        """Within it, `move` sends tensors to a device; at its end, they and the turn are there."""
        if device == self.at:
            yield
            return
        self.turns.check()
        self._sent = []
        try:
            yield
            sent = self._sent
            arrived = self._streams.of(device).record_event() if sent else None
        finally:
            self._sent = None
            self.rest()
        if arrived is not None:
            arrived.synchronize()
        self.turns.take(self, device)
        self.at = device
        if arrived is not None:
            computing = torch.get_device_module(device.type).current_stream(device)
            computing.wait_event(arrived)
            for tensor in sent:
                tensor.record_stream(computing)

    def send(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Copy a tensor to a device, within `going_to`; at once where there are no streams."""
        module = module_with_streams(device)
        if self._sent is None or module is None:
            return tensor.to(device)
        with contextlib.ExitStack() as stack:
            if tensor.device.type == device.type:
                source = self._streams.of(tensor.device)
                if not self._is_computed(tensor):
                    source.wait_stream(module.current_stream(tensor.device))
                stack.enter_context(module.stream(source))
            stack.enter_context(module.stream(self._streams.of(device)))
            copy = tensor.to(device)
        self._sent.append(copy)
        return copy

    def _is_computed(self, tensor: torch.Tensor) -> bool:
        """Whether the host has waited for this tensor before; it will have, from now on.

        A mask goes to each device: without this, it would wait at home for all that other runs
        have given home to do meanwhile.
        """
        if tensor.is_inference():  # whose changes are not counted
            return False
        known = self._computed.get(tensor) == tensor._version
        self._computed[tensor] = tensor._version
        return known

    def rest(self) -> None:
        """Give the turn back, if it holds one."""
        at, self.at = self.at, None
        if at is not None:
            self.turns.give_back(at)

    def wait_for_earlier(self) -> None:
        """Go on when all earlier runs have finished; they may have this one's turn meanwhile."""
        at = self.at
        self.rest()
        self.turns.wait_for_earlier(self.number)
        if at is not None:
            self.turns.take(self, at)
            self.at = at


def module_with_streams(device: torch.device) -> Any:
    """torch's module of a device, if that has streams."""
    module = torch.get_device_module(device.type)
    return module if device.type != "cpu" and hasattr(module, "Stream") else None


_run: ContextVar[Run | None] = ContextVar("run", default=None)


def current_run() -> Run | None:
    """The run in flight that this thread is, if it is one."""
    return _run.get()


@contextlib.contextmanager
def running(run: Run) -> Iterator[None]:
    """Within it, this thread is a run in flight."""
    token = _run.set(run)
    try:
        yield
    finally:
        run.rest()
        _run.reset(token)


_STAYS = contextlib.nullcontext()


def going_to(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Within it, a run in flight goes on to a device, and takes along what is moved there."""
    run = _run.get()
    return _STAYS if run is None else run.going_to(device)


def device_of_turn() -> torch.device | None:
    """The device whose turn this thread has, if it is a run in flight."""
    run = _run.get()
    return None if run is None else run.at


def rest() -> None:
    """Have a run in flight hold no device's turn, as its forward is done."""
    run = _run.get()
    if run is not None:
        run.rest()

"""Simulated devices that run behind the host, with streams and events as `torch.cuda` has them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import devices
import torch

from racing.executor import RacingExecutor, WatchingHost, is_pinned, memory_of, pin_memory
from racing.ordering import Clock, Launcher
from tl_devicefix.placement.devices import DEVICE_TYPE
from tl_devicefix.placement.memory import parse_bytes
from tl_devicefix.simulation.executor import CpuExecutor
from tl_devicefix.simulation.machine import Allocation, Machine, active_machine
from tl_devicefix.simulation.session import entering
from tl_devicefix.simulation.tensor import SimTensor

_numbers = itertools.count(1)


def _launcher() -> Launcher:
    executor = active_machine().executor
    assert isinstance(executor, RacingExecutor)
    return executor.launcher


class Stream:
    """A stream of a device, by default of the current one: its operations run in order."""

    def __init__(self, device: Any = None, *, stream_id: Any = None) -> None:
        self.device = torch.device(DEVICE_TYPE, active_machine().index_of(device))
        self.stream_id: int = next(_numbers) if stream_id is None else stream_id
        self._key = self.device.index, self.stream_id

    def wait_stream(self, stream: Stream) -> None:
        _launcher().order(self._key, _launcher().record(stream._key))

    def wait_event(self, event: Event) -> None:
        _launcher().order(self._key, event._recorded)

    def record_event(self) -> Event:
        return Event(_launcher().record(self._key))

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def query(self) -> bool:
        """Return True if the host has waited for all operations of this stream."""
        return _launcher().has_waited(_launcher().record(self._key))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


class Event:
    """A point in a stream, that other streams and the host can wait for."""

    def __init__(self, recorded: Clock) -> None:
        self._recorded = recorded

    def synchronize(self) -> None:
        _launcher().wait(self._recorded)


def current_stream(device: Any = None) -> Stream:
    index = active_machine().index_of(device)
    return Stream(index, stream_id=_launcher().current(index)[1])


def set_stream(stream: Stream) -> None:
    """Launch this thread's operations on a stream, whose device is the current one from now on."""
    _launcher().set_current(stream._key)
    active_machine().current.index = stream.device.index


@contextmanager
def stream(stream: Stream) -> Iterator[None]:
    """Within it, this thread launches operations on a stream, whose device is the current one."""
    before, device = current_stream(stream.device), active_machine().current.index
    set_stream(stream)
    try:
        yield
    finally:
        set_stream(before)
        active_machine().current.index = device


def record_stream(tensor: SimTensor, stream: Stream) -> None:
    """Hand out the memory again only when a stream has done what it has been given."""
    memory = memory_of(tensor._cpu)
    if memory is not None and memory.allocated is not None:
        memory.is_recorded |= memory.allocated.stream != stream._key


def synchronize(device: Any = None) -> None:
    _launcher().synchronize(active_machine().index_of(device))


class RacingMachine(Machine):
    executor: RacingExecutor

    def allocation_of(self, tensor: torch.Tensor, device: torch.device) -> Allocation:
        if self.is_open:
            self.executor.take(tensor, device.index)
        return super().allocation_of(tensor, device)


@contextmanager
def asynchronous(n_devices: int, memory: int | str = "80GiB") -> Iterator[RacingMachine]:
    """`simulate`, with devices behind the host; raises a `RaceError` on leaving at the latest."""
    if devices.TYPE:
        devices.skip_simulation()
    executor = RacingExecutor()
    with ExitStack() as stack:
        machine: Any = stack.enter_context(
            entering(lambda: RacingMachine([parse_bytes(memory)] * n_devices, executor))
        )
        stack.callback(setattr, machine, "executor", CpuExecutor())
        of_module = Stream, current_stream, set_stream, stream, synchronize
        stand_ins: tuple[Any, ...]
        for owner, stand_ins in (
            (torch.get_device_module("sim"), of_module),
            (SimTensor, (record_stream,)),
            (torch.Tensor, (pin_memory, is_pinned)),
        ):
            for stand_in in stand_ins:
                patch = mock.patch.object(owner, stand_in.__name__, stand_in, create=True)
                stack.enter_context(patch)
        with WatchingHost(executor.launcher):
            yield machine
        executor.launcher.synchronize()

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
    """A stream of a device, by default of the current one: what is given to it runs in order."""

    def __init__(self, device: Any = None, *, stream_id: Any = None) -> None:
        self.device = torch.device(DEVICE_TYPE, active_machine().index_of(device))
        self.stream_id: int = next(_numbers) if stream_id is None else stream_id

    @property
    def _key(self) -> tuple[int, int]:
        return self.device.index, self.stream_id

    def wait_stream(self, stream: Stream) -> None:
        """Have what is given to this stream from now on wait for what another has been given."""
        _launcher().order(self._key, _launcher().record(stream._key))

    def wait_event(self, event: Event) -> None:
        _launcher().order(self._key, event._recorded)

    def record_event(self) -> Event:
        event = Event()
        event._recorded = _launcher().record(self._key)
        return event

    def synchronize(self) -> None:
        _launcher().wait(_launcher().record(self._key))

    def query(self) -> bool:
        """Tell whether the host has waited for all that was given to this stream."""
        return _launcher().has_waited(_launcher().record(self._key))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


class Event:
    """A point in a stream, that other streams and the host can wait for."""

    _recorded: Clock

    def synchronize(self) -> None:
        _launcher().wait(self._recorded)


def current_stream(device: Any = None) -> Stream:
    index = active_machine().index_of(device)
    return Stream(index, stream_id=_launcher().current(index)[1])


def default_stream(device: Any = None) -> Stream:
    return Stream(device, stream_id=0)


def set_stream(stream: Stream) -> None:
    """Have this thread give operations to a stream, whose device is the current one from now on."""
    _launcher().set_current(stream._key)
    active_machine().current.index = stream.device.index


@contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    """Within it, this thread gives operations to a stream, whose device is the current one."""
    if stream is None:
        yield
        return
    machine = active_machine()
    before, device = current_stream(stream.device), machine.current.index
    set_stream(stream)
    try:
        yield
    finally:
        set_stream(before)
        machine.current.index = device


def record_stream(tensor: SimTensor, stream: Stream) -> None:
    """Keep the memory from being handed out before what a stream has been given has run."""
    memory, key = memory_of(tensor._cpu), (tensor.device.index, stream.stream_id)
    if memory is not None and memory.allocated is not None and memory.allocated.where != key:
        memory.is_recorded = True


def synchronize(device: Any = None) -> None:
    _launcher().synchronize(active_machine().index_of(device))


OF_THE_MODULE: tuple[Any, ...] = (Event, Stream, current_stream, default_stream, set_stream)
OF_THE_MODULE += (stream, synchronize)


class RacingMachine(Machine):
    executor: RacingExecutor

    def allocation_of(self, tensor: torch.Tensor, device: torch.device) -> Allocation:
        if self.is_open:
            self.executor.memory_of(tensor, device.index)
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
        for owner, stand_ins in (
            (torch.get_device_module("sim"), OF_THE_MODULE),
            (SimTensor, (record_stream,)),
            (torch.Tensor, (pin_memory, is_pinned)),
        ):
            for stand_in in stand_ins:
                name = stand_in.__name__
                stack.enter_context(mock.patch.object(owner, name, stand_in, create=True))
        with WatchingHost(executor.launcher):
            yield machine
        executor.launcher.synchronize()

"""Enter simulated devices that run behind the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import real_devices
import torch

from racing import streams
from racing.executor import RacingExecutor, WatchingHost, is_pinned, memory_of, pin_memory
from tl_devicefix.placement.memory import bytes_of
from tl_devicefix.simulation.executor import Executor
from tl_devicefix.simulation.machine import Allocation, Machine
from tl_devicefix.simulation.session import entering
from tl_devicefix.simulation.tensor import SimTensor


class RacingMachine(Machine):
    executor: RacingExecutor

    def allocation_of(self, tensor: torch.Tensor, device: torch.device) -> Allocation:
        if self.is_open:
            self.executor.memory_of(tensor, device.index)
        return super().allocation_of(tensor, device)


@contextmanager
def asynchronous(n_devices: int, memory: int | str = "80GiB") -> Iterator[RacingMachine]:
    """`simulate`, with devices behind the host; raises a `RaceError` on leaving at the latest."""
    if real_devices.TYPE:
        pytest.skip("races are found on simulated devices only")
    executor = RacingExecutor()
    with ExitStack() as stack:
        machine: Any = stack.enter_context(
            entering(lambda: RacingMachine([bytes_of(memory)] * n_devices, executor))
        )
        stack.callback(setattr, machine, "executor", Executor())
        module = torch.get_device_module("sim")

        def synchronize(device: Any = None) -> None:
            executor.launcher.synchronize(machine.index_of(device))

        stand_ins = [(module, name, getattr(streams, name)) for name in streams.__all__]
        stand_ins += [
            (module, "synchronize", synchronize),
            (SimTensor, "record_stream", record_stream),
            (torch.Tensor, "pin_memory", pin_memory),
            (torch.Tensor, "is_pinned", is_pinned),
        ]
        for owner, name, stand_in in stand_ins:
            stack.enter_context(mock.patch.object(owner, name, stand_in, create=True))
        with WatchingHost(executor.launcher):
            yield machine
        executor.launcher.synchronize()


def record_stream(tensor: SimTensor, stream: streams.Stream) -> None:
    """Keep the memory from being handed out before what a stream has been given has run."""
    memory, key = memory_of(tensor._cpu), (tensor.device.index, stream.stream_id)
    if memory is not None and memory.allocated is not None and memory.allocated.where != key:
        memory.is_recorded = True

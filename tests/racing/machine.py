"""Simulated devices that run behind the host, with streams and events as `torch.cuda` has them.

The CPU computes each operation at once, but it is not done for others until they wait for it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import devices
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from racing.ordering import HOST, Memory, Timeline, hold, memories_of
from tl_devicefix.placement.devices import DEVICE_TYPE
from tl_devicefix.placement.memory import parse_bytes
from tl_devicefix.simulation.executor import Args, CpuExecutor, Kwargs, Operation, dense_tensors
from tl_devicefix.simulation.machine import Allocation, Machine, active_machine
from tl_devicefix.simulation.session import entering
from tl_devicefix.simulation.tensor import SimTensor

aten = torch.ops.aten

# What `torch.get_device_module("sim")` has.

_streams: list[Stream] = []


class Stream(Timeline):
    """A stream of a device, by default of the current one: its operations run in order."""

    def __init__(self, device: Any = None) -> None:
        self.device = torch.device(DEVICE_TYPE, active_machine().index_of(device))
        super().__init__(f"stream {len(_streams)} of {self.device}")
        _streams.append(self)


_default_stream = functools.cache(Stream)


def current_stream(device: Any = None) -> Stream:
    """Return the stream of a device that this thread launches operations on."""
    machine = active_machine()
    index = machine.index_of(device)
    stream: Stream | None = vars(machine.current).get(f"stream of {index}")
    return stream or _default_stream(index)


def set_stream(stream: Stream) -> None:
    """Launch this thread's operations on a stream, whose device is the current one from now on."""
    index = stream.device.index
    vars(active_machine().current).update({"index": index, f"stream of {index}": stream})


@contextmanager
def stream(stream: Stream) -> Iterator[None]:
    """Within it, this thread launches operations on a stream, whose device is the current one."""
    with mock.patch.dict(vars(active_machine().current)):
        set_stream(stream)
        yield


def synchronize(device: Any = None) -> None:
    index = active_machine().index_of(device)
    for stream in _streams:
        if stream.device.index == index:
            stream.synchronize()


# What `torch.Tensor` has.


def record_stream(tensor: SimTensor, stream: Stream) -> None:
    """Hand out the memory again only when a stream has done what it has been given."""
    for memory in memories_of(tensor._cpu):
        memory.is_recorded |= memory.stream is not stream


def is_pinned(tensor: torch.Tensor, device: Any = None) -> bool:
    return tensor.device.type == "cpu" and bool(memories_of(tensor))


def pin_memory(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    return tensor if is_pinned(tensor) else hold(tensor.clone(), Memory())


_numpy = torch.Tensor.numpy


def numpy(tensor: torch.Tensor, *, force: bool = False) -> Any:
    HOST.launch("numpy", tensor, ())
    return _numpy(tensor, force=force)


# Operations of devices, and of the host.


class RacingExecutor(CpuExecutor):
    """Computes operations on the CPU, and launches them on devices' current streams.

    Attributes:
        copies: the stream of each copy between devices, or between a device and the host.
    """

    def __init__(self) -> None:
        self.copies: list[Stream] = []

    def run(self, func: Operation, args: Args, kwargs: Kwargs, device: int | None) -> Any:
        """Launch an operation."""
        if func in (aten.copy_.default, aten._to_copy.default):
            source = args[1] if func is aten.copy_.default else args[0]
            streams = [memory.stream for memory in memories_of(source)]
            of = streams[0].device.index if any(streams) else None  # None for the host
            if of != device:
                return self._copy(func, args, kwargs, source, [of, device])
        if not func.is_view:
            name = func._schema.name.removeprefix("aten::")
            # Operands of `zeros_like` give only a shape, and may be on another device.
            gives_shape = name.endswith("_like") or name.startswith(("empty", "new_"))
            reads = () if gives_shape else (args, list(kwargs.values()))
            current_stream(device).launch(str(func), reads, _written(func, args, kwargs))
        return func(*args, **kwargs)

    def _copy(
        self, func: Operation, args: Args, kwargs: Kwargs, source: Any, ends: list[int | None]
    ) -> torch.Tensor:
        """Copy between two devices, or the host and one, as CUDA does.

        With `non_blocking`, the host goes on at once, unless the copy writes to unpinned memory.
        """
        non_blocking, to_host = any(args[2:]) or kwargs.get("non_blocking"), ends[1] is None
        target: torch.Tensor = func(*args, **kwargs)
        if not target.numel():  # torch returns before it looks at the streams
            return target
        if non_blocking and to_host and func is aten._to_copy.default:
            hold(target, Memory())  # torch allocates it pinned
        streams = [current_stream(index) for index in ends if index is not None]
        self.copies.append(streams[0])
        streams[-1].wait_stream(streams[0])
        streams[-1].launch("copy_", source, target)
        streams[0].wait_stream(streams[-1])
        if None in ends and not (non_blocking and (is_pinned(target) or not to_host)):
            streams[0].synchronize()
        return target

    def read(self, tensor: torch.Tensor, device: int) -> torch.Tensor:
        """Wait until the device's current stream is done."""
        current_stream(device).synchronize()
        HOST.launch("a read of its values", tensor, ())
        return tensor


def _written(func: Operation, args: Args, kwargs: Kwargs) -> list[Any]:
    """Return the tensors that an operation changes in place."""
    return [
        args[i] if i < len(args) else kwargs.get(argument.name)
        for i, argument in enumerate(func._schema.arguments)
        if argument.alias_info and argument.alias_info.is_write
    ]


class WatchingHost(TorchDispatchMode):
    """Within it, the host's own uses of pinned memory are checked, in the thread that entered."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = dense_tensors((args, tuple(kwargs.values())))
        if not func.is_view and all(tensor.device.type == "cpu" for tensor in tensors):
            HOST.launch(str(func), tensors, _written(func, args, kwargs))
        if kwargs.get("pin_memory"):
            return hold(func(*args, **{**kwargs, "pin_memory": False}), Memory())
        return func(*args, **kwargs)


class RacingMachine(Machine):
    executor: RacingExecutor

    def allocation_of(self, tensor: torch.Tensor, device: torch.device) -> Allocation:
        if self.is_open and not memories_of(tensor):
            hold(tensor, Memory(current_stream(device)))
        return super().allocation_of(tensor, device)


@contextmanager
def asynchronous(n_devices: int, memory: int | str = "80GiB") -> Iterator[Machine]:
    """Like `simulate`, with devices behind the host; raises a `RaceError` at exit at the latest."""
    if devices.TYPE:
        devices.skip_simulation()
    sizes = [parse_bytes(memory)] * n_devices
    with ExitStack() as stack:
        machine: Any = stack.enter_context(entering(lambda: RacingMachine(sizes, RacingExecutor())))
        stack.callback(setattr, machine, "executor", CpuExecutor())
        module: Any = torch.get_device_module("sim")
        owners: list[Any] = [
            (module, Stream, current_stream, set_stream, stream, synchronize),
            (SimTensor, record_stream),
            (torch.Tensor, pin_memory, is_pinned, numpy),
        ]
        for owner, *stand_ins in owners:
            new: Any = {stand_in.__name__: stand_in for stand_in in stand_ins}
            stack.enter_context(mock.patch.multiple(owner, create=True, **new))
        with WatchingHost():
            yield machine
        for index in range(n_devices):
            synchronize(index)

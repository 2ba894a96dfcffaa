"""Launches operations on streams of devices, behind the host.

The CPU computes each at once, but it is done when somebody has waited for it. Memory without values
yet is poisoned: all bits are 1, which is NaN, or -1.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from racing.ordering import Launcher, Memory
from tl_devicefix.simulation.executor import Args, CpuExecutor, Kwargs, Operation, dense_tensors

aten = torch.ops.aten

_WITHOUT_VALUES = {
    *(aten.empty.memory_format, aten.empty_strided.default),
    *(aten.empty_like.default, aten.new_empty.default, aten.new_empty_strided.default),
}
_OF_A_SHAPE = {
    *_WITHOUT_VALUES,
    *(aten.zeros_like.default, aten.ones_like.default, aten.full_like.default),
    *(aten.rand_like.default, aten.randn_like.default),
    *(aten.new_zeros.default, aten.new_ones.default, aten.new_full.default),
}
"""Operations that read no value of their tensor, which may be on another device."""
_DEPENDS_ON_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class RacingExecutor(CpuExecutor):
    """Computes operations on the CPU, but has them done later, on streams of devices."""

    def __init__(self) -> None:
        self.launcher = Launcher()

    def memory_of(self, tensor: torch.Tensor, device: int) -> Memory:
        """The users of the memory of a tensor, which is on a device from now on."""
        memory = memory_of(tensor)
        if memory is None:  # of a copy that was made on the host
            allocation = self.launcher.allocate(self.launcher.current(device))
            memory = Memory(allocation, allocated=allocation.operation)
            _hold(tensor, memory, self.launcher.freed)
        return memory

    def run(self, func: Operation, args: Args, kwargs: Kwargs, device: int | None) -> Any:
        """Launch an operation on a device's current stream; wait if it depends on values."""
        if func is aten.copy_.default:
            target, source, *rest = args
            self._launch_copy(target, source, device, _device_of(source), *rest)
            return target
        if func is aten._to_copy.default and device != (of := _device_of(args[0])):
            return self._convert(device, of, *args, **kwargs)
        if _is_view(func):
            return func(*args, **kwargs)
        assert device is not None
        stream = self.launcher.current(device)
        if func in _WITHOUT_VALUES:
            made = func(*args, **kwargs)
            self.memory_of(_poisoned(made), device)
            return made
        reads = [] if func in _OF_A_SHAPE else (args, list(kwargs.values()))
        used = _memories_of(reads), _memories_of(_written(func, args, kwargs))
        launched = self.launcher.launch(str(func), stream, *used)
        result = func(*args, **kwargs)
        for tensor in dense_tensors(result):
            if memory_of(tensor) is None:
                memory = Memory(launched, allocated=launched.operation)
                _hold(tensor, memory, self.launcher.freed)
        if _depends_on_values(func, args):
            self.launcher.wait(self.launcher.record(stream))
        return result

    def read(self, tensor: torch.Tensor, device: int) -> torch.Tensor:
        """Wait until the device's current stream is done."""
        self.launcher.wait(self.launcher.record(self.launcher.current(device)))
        self.launcher.host_uses("a read of its values", _memories_of([tensor]), ())
        return tensor

    def _convert(
        self,
        to: int | None,
        of: int | None,
        source: torch.Tensor,
        non_blocking: bool = False,
        pin_memory: bool | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """Launch a copy; to the host, into pinned memory if it does not wait."""
        copied = aten._to_copy.default(source, **options)
        if to is not None:
            for part in dense_tensors(copied):
                self.memory_of(part, to)
        elif non_blocking:  # torch takes pinned memory for it
            pinned(_poisoned(copied))
        self._launch_copy(copied, source, to, of, non_blocking, has_values=True)
        return copied

    def _launch_copy(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        to: int | None,
        of: int | None,
        non_blocking: bool = False,
        has_values: bool = False,
    ) -> None:
        """Copy between two devices, or the host (None) and one, as CUDA does.

        Between devices, it runs on the source's stream, and both streams wait for it. The host
        goes on at once if it asks to, and its memory is pinned.
        """
        device = to if of is None else of
        assert device is not None
        launcher, stream = self.launcher, self.launcher.current(device)
        taking = None if to is None or to == device else launcher.current(to)
        host = source if of is None else target if to is None else None
        waits = host is not None and not (non_blocking and (of is None or is_pinned(host)))
        if taking is not None:
            launcher.order(stream, launcher.record(taking))
        used = _memories_of([source]), _memories_of([target])
        launched = launcher.launch("copy_", stream, *used, is_copy=to != of)
        if to != of and target.numel():
            launcher.copies.append(stream)
        if host is not None:
            launcher.arrive(launcher.clock_of(stream))
        if to is None and not waits:
            values = source.clone()
            launcher.arrive_later(launched, lambda: target.copy_(values))
        elif not has_values:
            target.copy_(source)
        if taking is not None:
            launcher.order(taking, launcher.record(stream))
        if waits:
            launcher.wait(launcher.record(stream))


def _is_view(func: Operation) -> bool:
    """Whether an operation gives other views of memory, and computes nothing."""
    return func.is_view or func is aten._unsafe_view.default or torch.Tag.inplace_view in func.tags


def _depends_on_values(func: Operation, args: Args) -> bool:
    """Whether an operation's result is a number, or its shape depends on values."""
    if func is aten.index.Tensor:  # numbers give a shape without being known
        return any(index.dtype in (torch.bool, torch.uint8) for index in dense_tensors(args[1]))
    return func is aten._linalg_check_errors.default or bool(_DEPENDS_ON_VALUES & set(func.tags))


def _written(func: Operation, args: Args, kwargs: Kwargs) -> list[torch.Tensor]:
    """The tensors that an operation changes in place."""
    names = _written_arguments(func)
    return dense_tensors([args[i] if i < len(args) else kwargs.get(name) for i, name in names])


@cache
def _written_arguments(func: Operation) -> tuple[tuple[int, str], ...]:
    return tuple(
        (index, argument.name)
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


class _Held:
    """On a storage: who uses its memory, which is freed with it."""

    __slots__ = ("_freed", "memory")

    def __init__(self, memory: Memory, freed: deque[Memory] | None) -> None:
        self.memory, self._freed = memory, freed

    def __del__(self) -> None:  # by any thread, in the middle of anything
        if self._freed is not None:
            self._freed.append(self.memory)


_HELD = "_racing_memory"
"""An attribute of storages; torch keeps a storage's object for as long as the storage."""


def _hold(tensor: torch.Tensor, memory: Memory, freed: deque[Memory] | None) -> None:
    vars(tensor.untyped_storage())[_HELD] = _Held(memory, freed)


def memory_of(tensor: torch.Tensor) -> Memory | None:
    """Who used a tensor's memory, if that is a device's, or pinned."""
    held = vars(tensor.untyped_storage()).get(_HELD)
    return None if held is None else held.memory


def _memories_of(tensors: Sequence[Any]) -> list[Memory]:
    memories = map(memory_of, dense_tensors(tensors))
    return [memory for memory in memories if memory is not None]


def _device_of(tensor: torch.Tensor) -> int | None:
    """The index of a tensor's device; None of the host's."""
    allocated = [memory.allocated for memory in _memories_of([tensor])]
    return None if not allocated or allocated[0] is None else allocated[0].where[0]


def _poisoned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, without values."""
    torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).fill_(0xFF)
    return tensor


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, whose memory counts as pinned."""
    _hold(tensor, Memory(), None)
    return tensor


def is_pinned(tensor: torch.Tensor, device: Any = None) -> bool:
    return tensor.device.type == "cpu" and memory_of(tensor) is not None


def pin_memory(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    return tensor if is_pinned(tensor) else pinned(tensor.clone())


class WatchingHost(TorchDispatchMode):
    """Within it, the host's own use of pinned memory is checked, in the thread that entered."""

    def __init__(self, launcher: Launcher) -> None:
        super().__init__()
        self._launcher = launcher

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not func.is_view:
            tensors = dense_tensors((args, tuple(kwargs.values())))
            if all(tensor.device.type == "cpu" for tensor in tensors):
                changed = _written(func, args, kwargs)
                reads = [t for t in tensors if not any(t is other for other in changed)]
                self._launcher.host_uses(str(func), _memories_of(reads), _memories_of(changed))
        if kwargs.get("pin_memory"):
            return pinned(func(*args, **{**kwargs, "pin_memory": False}))
        return func(*args, **kwargs)

"""Launches operations on streams of devices, behind the host.

The CPU computes each at once, but it counts as done when somebody has waited for it. Memory without
values yet is poisoned: all bits are 1, which is NaN, or -1.
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

_EMPTY = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}
_READ_NO_VALUES = {
    *_EMPTY,
    *(f"{value}_like" for value in ("zeros", "ones", "full", "rand", "randn")),
    *(f"new_{value}" for value in ("zeros", "ones", "full")),
}
"""Operations that take a shape from a tensor, which may be on another device."""
_DEPENDS_ON_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class RacingExecutor(CpuExecutor):
    """Computes operations on the CPU, but has them done later, on streams of devices."""

    def __init__(self) -> None:
        self.launcher = Launcher()

    def take(self, tensor: torch.Tensor, device: int) -> None:
        """Have memory of a device be of its current stream, unless it is of one already."""
        if memory_of(tensor) is None:
            taken = self.launcher.allocate(self.launcher.current(device))
            _hold(tensor, Memory(taken, allocated=taken), self.launcher.freed)

    def run(self, func: Operation, args: Args, kwargs: Kwargs, device: int | None) -> Any:
        """Launch an operation on a device's current stream; wait if it depends on values."""
        if func is aten.copy_.default:
            return self._copy(args[0], args[1], device, _device_of(args[1]), *args[2:])
        if func is aten._to_copy.default and device != (of := _device_of(args[0])):
            return self._convert(device, of, *args, **kwargs)
        if func.is_view or func is aten._unsafe_view.default or torch.Tag.inplace_view in func.tags:
            return func(*args, **kwargs)
        assert device is not None
        name = func._schema.name.removeprefix("aten::")
        if name in _EMPTY:
            made = _poisoned(func(*args, **kwargs))
            self.take(made, device)
            return made
        stream = self.launcher.current(device)
        reads = [] if name in _READ_NO_VALUES else _memories_of((args, list(kwargs.values())))
        writes = _memories_of(_written(func, args, kwargs))
        launched = self.launcher.launch(str(func), stream, reads, writes)
        result = func(*args, **kwargs)
        for tensor in dense_tensors(result):
            if memory_of(tensor) is None:
                _hold(tensor, Memory(launched, allocated=launched), self.launcher.freed)
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
        """Launch a copy into new memory, on the host into pinned memory if it does not wait."""
        target = aten._to_copy.default(source, **options)
        if to is not None:
            for part in dense_tensors(target):
                self.take(part, to)
        elif non_blocking:  # because torch takes pinned memory for it
            pinned(_poisoned(target))
        return self._copy(target, source, to, of, non_blocking)

    def _copy(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        to: int | None,
        of: int | None,
        non_blocking: bool = False,
    ) -> torch.Tensor:
        """Copy between two devices, or the host (None) and one, as CUDA does.

        Between devices, it runs on the source's stream, and both streams wait for it. The host goes
        on at once if it asks to, and its memory is pinned or read from.
        """
        device = to if of is None else of
        assert device is not None
        launcher, stream = self.launcher, self.launcher.current(device)
        taker = None if to is None or to == device else launcher.current(to)
        waits = (of is None and not non_blocking) or (
            to is None and not (non_blocking and is_pinned(target))
        )
        if taker is not None:
            launcher.order(stream, launcher.record(taker))
        used = _memories_of([source]), _memories_of([target])
        launched = launcher.launch("copy_", stream, *used, is_copy=to != of)
        if to != of and target.numel():
            launcher.copies.append(stream)
        if of is None or to is None:
            # Because an earlier copy of the stream may be what brings values to the source.
            launcher.arrive(launcher.record(stream))
        if to is None and not waits:
            values = source.clone()
            launcher.arrive_later(launched, lambda: target.copy_(values))
        else:
            target.copy_(source)
        if taker is not None:
            launcher.order(taker, launcher.record(stream))
        if waits:
            launcher.wait(launcher.record(stream))
        return target


def _depends_on_values(func: Operation, args: Args) -> bool:
    """Return True if an operation's result is a number, or its shape depends on values."""
    if func is aten.index.Tensor:  # numbers give a shape without being known
        return any(index.dtype in (torch.bool, torch.uint8) for index in dense_tensors(args[1]))
    return func is aten._linalg_check_errors.default or bool(_DEPENDS_ON_VALUES & set(func.tags))


def _written(func: Operation, args: Args, kwargs: Kwargs) -> list[torch.Tensor]:
    """Return the tensors that an operation changes in place."""
    names = _written_arguments(func)
    return dense_tensors([args[i] if i < len(args) else kwargs.get(name) for i, name in names])


@cache
def _written_arguments(func: Operation) -> list[tuple[int, str]]:
    arguments = enumerate(func._schema.arguments)
    return [(i, it.name) for i, it in arguments if it.alias_info and it.alias_info.is_write]


class _Held:
    """The uses of a storage's memory, which is freed with the storage."""

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
    """Return the uses of a tensor's memory, if that is a device's, or pinned."""
    held = vars(tensor.untyped_storage()).get(_HELD)
    return None if held is None else held.memory


def _memories_of(tensors: Sequence[Any]) -> list[Memory]:
    memories = map(memory_of, dense_tensors(tensors))
    return [memory for memory in memories if memory is not None]


def _device_of(tensor: torch.Tensor) -> int | None:
    """Return the index of a tensor's device; None for the host."""
    taken = [memory.allocated for memory in _memories_of([tensor])]
    return None if not taken or taken[0] is None else taken[0].stream[0]


def _poisoned(tensor: torch.Tensor) -> torch.Tensor:
    torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).fill_(0xFF)
    return tensor


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, whose memory counts as pinned from now on."""
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
                changed = _memories_of(_written(func, args, kwargs))
                self._launcher.host_uses(str(func), _memories_of(tensors), changed)
        if kwargs.get("pin_memory"):
            return pinned(func(*args, **{**kwargs, "pin_memory": False}))
        return func(*args, **kwargs)

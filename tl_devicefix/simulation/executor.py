"""Executors of a machine's operations: on the CPU at once, without values, or behind the host.

Behind the host, as real devices are, each operation is launched on a stream of its device, and
checked against those before it (`ordering`). The CPU computes it at once; but it is done when its
device would be through with it, and whoever uses its result earlier, without waiting, has a race.
Memory without values yet is poisoned: all bits are 1, which is NaN, or -1.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from tl_devicefix.simulation.geometry import (
    Geometry,
    call_without_values,
    depends_on_values,
    geometry_of,
    is_view,
    tensors_in,
    written,
)
from tl_devicefix.simulation.ordering import Launcher, Memory

aten = torch.ops.aten


class Executor:
    """Runs operations on the tensors behind the simulated ones: on the CPU, at once.

    Devices are indices, and None is the host.
    """

    place = torch.device("cpu")
    """Where the tensors are that factories make before `upload`: the CPU, or meta."""

    def run(self, func: Any, args: Any, kwargs: dict[str, Any], device: int) -> Any:
        """Run an operation on a device, and return what it gives."""
        return func(*args, **kwargs)

    def allocate(self, geometry: Geometry, device: int) -> torch.Tensor:
        """Make a tensor in memory of a device, without values of its own."""
        return geometry.empty(self.place)

    def upload(self, values: torch.Tensor, device: int) -> torch.Tensor:
        """Put values that no one else has on a device."""
        return values

    def resolve(self, tensor: torch.Tensor, device: int) -> torch.Tensor:
        """Copy a tensor; of a conjugated or negated view, its values."""
        return self.run(aten.clone.default, (tensor,), {}, device)  # type: ignore[no-any-return]

    def read(self, tensor: torch.Tensor, device: int) -> torch.Tensor:
        """Return a tensor of a device with its values, for the host."""
        return tensor

    def copy(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        to: int | None,
        of: int | None,
        non_blocking: bool = False,
    ) -> None:
        """Copy in place between two devices, or a device and the host."""
        target.copy_(source)

    def convert(
        self, source: torch.Tensor, of: int, to: int | None, options: dict[str, Any]
    ) -> torch.Tensor:
        """Copy to a device or the host, also to another dtype: ``.to`` with torch's options."""
        return aten._to_copy.default(source, **options)  # type: ignore[no-any-return]

    def memory_of(self, tensor: torch.Tensor, device: int) -> Memory | None:
        """Return the users of the memory of a tensor, which is on a device from now on."""
        return None

    def free(self, memory: Memory) -> None:
        """Let go of memory, in the middle of anything."""

    def synchronize(self, device: int) -> None:
        """Wait for all operations of a device."""

    def contents(self, device: int) -> str:
        """Say in a sentence what takes the memory of a device, for errors; empty if not known."""
        return ""


class MetaExecutor(Executor):
    """Computes nothing: tensors have shapes, and no values."""

    place = torch.device("meta")

    def run(self, func: Any, args: Any, kwargs: dict[str, Any], device: int) -> Any:
        """Make what the operation would give.

        Raises:
            NotImplementedError: if that depends on values.
        """
        try:
            return call_without_values(func, args, kwargs)
        except RuntimeError as error:  # NotImplementedError is one
            if re.search(r"meta tensor|with Meta|register_meta", str(error)):
                raise NotImplementedError(
                    f"the result of {func} depends on values, which a dry run does not have: "
                    "change or skip that operation, or run it on real devices"
                ) from error
            raise

    def upload(self, values: torch.Tensor, device: int) -> torch.Tensor:
        """Forget the values."""
        return values.to(self.place)

    def copy(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        to: int | None,
        of: int | None,
        non_blocking: bool = False,
    ) -> None:
        """Write zeros to integers of the host, which may be indices; writing more takes memory."""
        if not (source.is_meta and to is None):
            target.copy_(source)
        elif not target.is_floating_point():
            target.zero_()

    def convert(
        self, source: torch.Tensor, of: int, to: int | None, options: dict[str, Any]
    ) -> torch.Tensor:
        """Copy the shape; the host gets zeros."""
        converted = super().convert(source, of, to, options)
        return zeros_for(converted) if to is None else converted


def zeros_for(meta: torch.Tensor) -> torch.Tensor:
    """Zeros on the CPU, which take no memory until they are written to."""
    blank = torch.from_numpy(numpy.zeros(geometry_of(meta).nbytes, numpy.uint8))
    return blank.view(meta.dtype).as_strided(meta.shape, meta.stride())


_COUNTED_AS: dict[Any, Any] = {  # the CPU's kernels, by those that torch has formulas for
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        aten._scaled_dot_product_flash_attention_backward
    ),
}


class Speed(NamedTuple):
    """How much a device does in a second; None for what takes no time."""

    flops: float | None = None
    bytes: float | None = None

    def seconds_for(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> float:
        """How long an operation takes: by torch's formulas, and 0 where it has none."""
        if self.flops is None:
            return 0.0
        packet = func._overloadpacket
        formula: Any = flop_registry.get(_COUNTED_AS.get(packet, packet))
        return 0.0 if formula is None else formula(*args, **kwargs, out_val=result) / self.flops

    def seconds_to_copy(self, copied: torch.Tensor) -> float:
        """How long a copy takes from a device to another, or between one and the host."""
        return 0.0 if self.bytes is None else copied.numel() * copied.element_size() / self.bytes


_WITHOUT_VALUES = {aten.empty_like.default, aten.new_empty.default, aten.new_empty_strided.default}
_OF_A_SHAPE = {
    *_WITHOUT_VALUES,
    *(aten.zeros_like.default, aten.ones_like.default, aten.full_like.default),
    *(aten.rand_like.default, aten.randn_like.default),
    *(aten.new_zeros.default, aten.new_ones.default, aten.new_full.default),
}
"""Operations that read no value of their tensor, which may be on another device."""


_MEMORY = "_tl_devicefix_memory"
"""An attribute of storages; torch keeps a storage's object for as long as the storage."""


def _memory_of(tensor: torch.Tensor) -> Memory | None:
    """Who used a tensor's memory, if that is a device's, or pinned."""
    return vars(tensor.untyped_storage()).get(_MEMORY)


def _set_memory(tensor: torch.Tensor, memory: Memory) -> Memory:
    vars(tensor.untyped_storage())[_MEMORY] = memory
    return memory


def _memories_of(tensors: Sequence[Any]) -> list[Memory]:
    memories = map(_memory_of, tensors_in(tensors))
    return [memory for memory in memories if memory is not None]


def is_pinned(tensor: torch.Tensor, device: Any = None) -> bool:
    """Stand in for `Tensor.is_pinned`."""
    return tensor.device.type == "cpu" and _memory_of(tensor) is not None


def pin_memory(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    """Stand in for `Tensor.pin_memory`."""
    return tensor if is_pinned(tensor) else _pinned(tensor.clone())


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Say that a tensor's memory is pinned."""
    _set_memory(tensor, Memory())
    return tensor


def _poisoned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, without values."""
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    storage.fill_(0xFF)
    return tensor


class AsynchronousExecutor(Executor):
    """Computes operations on the CPU, but has them done later, on streams of devices.

    Args:
        speed: how long operations and copies take.
    """

    def __init__(self, speed: Speed) -> None:
        self.launcher = Launcher()
        self._speed = speed

    def allocate(self, geometry: Geometry, device: int) -> torch.Tensor:
        """Take memory that is poisoned, on the current stream."""
        made = super().allocate(geometry, device)
        self.launcher.free_first()
        self.memory_of(_poisoned(made), device)
        return made

    def memory_of(self, tensor: torch.Tensor, device: int) -> Memory:
        """Return who used it, from now on if it was the host's."""
        memory = _memory_of(tensor)
        if memory is None:  # of a copy that was made on the host
            allocation = self.launcher.allocate(self.launcher.current(device))
            memory = _set_memory(tensor, Memory(allocation, allocated=allocation.operation))
        return memory

    def free(self, memory: Memory) -> None:
        """Free it, and note whether another stream may still use it."""
        self.launcher.free(memory)

    def synchronize(self, device: int) -> None:
        """Wait for all streams of a device."""
        self.launcher.synchronize(device)

    def keep_busy(self, device: int, seconds: float) -> None:
        """Launch something that takes so long on a device's current stream."""
        launched = self.launcher.launch("keep_busy", self.launcher.current(device))
        self.launcher.take(launched, seconds)

    # Operations

    def run(self, func: Any, args: Any, kwargs: dict[str, Any], device: int) -> Any:
        """Launch an operation on a device's current stream, and compute it.

        The host waits if the result, or its shape, depends on values.
        """
        if is_view(func):
            return func(*args, **kwargs)
        stream = self.launcher.current(device)
        reads = [] if func in _OF_A_SHAPE else (args, list(kwargs.values()))
        used = _memories_of(reads), _memories_of(written(func, args, kwargs))
        launched = self.launcher.launch(str(func), stream, *used)
        result = func(*args, **kwargs)
        for tensor in tensors_in(result):
            if _memory_of(tensor) is None:
                made = _poisoned(tensor) if func in _WITHOUT_VALUES else tensor
                _set_memory(made, Memory(launched, allocated=launched.operation))
        self.launcher.take(launched, self._speed.seconds_for(func, args, kwargs, result))
        if depends_on_values(func, args):
            self.launcher.wait(self.launcher.record(stream))
        return result

    def upload(self, values: torch.Tensor, device: int) -> torch.Tensor:
        """Launch a copy."""
        return self.resolve(values, device)

    def read(self, tensor: torch.Tensor, device: int) -> torch.Tensor:
        """Wait until the device's current stream is done."""
        self.launcher.wait(self.launcher.record(self.launcher.current(device)))
        self.launcher.host_uses("a read of its values", _memories_of([tensor]), ())
        return tensor

    # Copies

    def copy(
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

        Args:
            target: what is copied to.
            source: what is copied.
            to: the target's device.
            of: the source's device.
            non_blocking: whether the host asks to go on.
            has_values: whether the target has got the values already.
        """
        device = to if of is None else of
        assert device is not None
        stream = self.launcher.current(device)
        is_copy = to != of
        taking = None if to is None or to == device else self.launcher.current(to)
        host = source if of is None else target if to is None else None
        waits = host is not None and not (non_blocking and (of is None or is_pinned(host)))
        if taking is not None:
            self.launcher.order(stream, self.launcher.record(taking))
        used = _memories_of([source]), _memories_of([target])
        launched = self.launcher.launch("copy_", stream, *used, is_copy)
        if host is not None:
            self.launcher.arrive(self.launcher.clock_of(stream))
        if to is None and not waits:
            values = source.clone()
            self.launcher.arrive_later(launched, lambda: target.copy_(values))
        elif not has_values:
            target.copy_(source)
        seconds = self._speed.seconds_to_copy(target) if is_copy else 0.0
        self.launcher.take(launched, seconds, is_copy)
        if taking is not None:
            self.launcher.order(taking, self.launcher.record(stream))
        if waits:
            self.launcher.wait(self.launcher.record(stream))

    def convert(
        self, source: torch.Tensor, of: int, to: int | None, options: dict[str, Any]
    ) -> torch.Tensor:
        """Launch a copy; to the host, into pinned memory if it does not wait."""
        non_blocking = options.pop("non_blocking", False)
        options.pop("pin_memory", None)
        copied = aten._to_copy.default(source, **options)
        if to is not None:
            for part in tensors_in(copied):
                self.memory_of(part, to)
        elif non_blocking:  # torch takes pinned memory for it
            _pinned(_poisoned(copied))
        self.copy(copied, source, to, of, non_blocking, has_values=True)
        return copied


class WatchingHost(TorchDispatchMode):
    """Within it, the host's own use of pinned memory is checked, in the thread that entered."""

    def __init__(self, launcher: Launcher) -> None:
        super().__init__()
        self._launcher = launcher

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Look at the tensors of the host, and run ``func``."""
        kwargs = kwargs or {}
        if not func.is_view:
            tensors = tensors_in((args, tuple(kwargs.values())))
            if all(tensor.device.type == "cpu" for tensor in tensors):
                changed = written(func, args, kwargs)
                reads = [t for t in tensors if not any(t is other for other in changed)]
                self._launcher.host_uses(str(func), _memories_of(reads), _memories_of(changed))
        if kwargs.get("pin_memory"):
            return _pinned(func(*args, **{**kwargs, "pin_memory": False}))
        return func(*args, **kwargs)

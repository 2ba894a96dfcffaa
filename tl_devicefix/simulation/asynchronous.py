"""Devices that run behind the host, as real ones do.

An operation is launched on a stream of its device (`ordering`), and the host goes on: it knows the
shapes of the result (`geometry`), and has memory for it (`memory`). The device's thread runs it
when the stream gets there (`queues`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

from tl_devicefix.simulation.geometry import (
    Arguments,
    Geometry,
    NotBehindTheHost,
    Outcome,
    exchanged,
    geometry_of,
    outcome,
    tensors_in,
    written,
)
from tl_devicefix.simulation.memory import Block, DeviceMemory, Pinned
from tl_devicefix.simulation.ordering import Launcher, StreamKey
from tl_devicefix.simulation.queues import Task
from tl_devicefix.simulation.timeline import Timeline

aten = torch.ops.aten

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
    *(aten.zeros_like.default, aten.ones_like.default, aten.full_like.default),
    *(aten.rand_like.default, aten.randn_like.default),
    *(aten.new_zeros.default, aten.new_ones.default, aten.new_full.default),
}
"""Operations that read no value of their tensor, which may be on another device."""
_CPU_ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default
"""Tagged as if it drew random numbers; torch chooses another where there is dropout."""
_WAITING_TAGS = {
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
}


class Asynchronous:
    """The asynchronous side of a machine.

    Tensors here are the CPU tensors behind the simulated ones, and devices are indices.

    Args:
        n_devices: how many devices.
        seed: of the delays.
        speed: how long operations and copies take, if they take time.
    """

    has_streams = True

    def __init__(self, n_devices: int, seed: int, speed: Speed) -> None:
        self.pinned = Pinned()
        self.launcher = Launcher(n_devices, seed, takes_time=speed != Speed())
        self.memory = DeviceMemory(self.launcher, self.pinned)
        self._speed = speed

    @property
    def timeline(self) -> Timeline:
        """What took time on the devices."""
        return self.launcher.timeline

    def allocate(self, geometry: Geometry, device: int) -> torch.Tensor:
        """A tensor in memory of a device, without values of its own."""
        return self.memory.empty(geometry, self.launcher.current(device))

    def block_of(self, tensor: torch.Tensor, device: int) -> Block:
        """The memory of a tensor that is on a device from now on."""
        return self.memory.block_of(tensor, device)

    def free(self, block: Block) -> None:
        """Let memory be handed out again. This may be called in the middle of anything."""
        self.memory.free(block)

    def synchronize(self, device: int) -> None:
        """Wait for all operations of a device."""
        self.launcher.synchronize(device)

    # Operations

    def run(self, func: Any, args: Any, kwargs: dict[str, Any], device: int) -> Any:
        """Launch an operation on a device's current stream; return what it will have given.

        If its result, or the result's shape, depends on values, it waits for them.
        """
        if func.is_view or func is aten._unsafe_view.default:
            return func(*args, **kwargs)
        if torch.Tag.inplace_view in func.tags:
            return self._change_view(func, args, kwargs, device)
        arguments = Arguments(args, kwargs)
        stream = self.launcher.current(device)
        if _must_wait(func, arguments):
            return self._run_waiting(func, arguments, stream)
        try:
            expected = outcome(func, arguments)
        except NotBehindTheHost:
            raise
        except Exception:  # noqa: BLE001  # of zeros, or of any values: the values tell
            return self._run_waiting(func, arguments, stream)
        if func in _WITHOUT_VALUES:
            return self.memory.empty(expected.result, stream)
        return self._run_behind(func, arguments, expected, stream)

    def _run_behind(
        self, func: Any, arguments: Arguments, expected: Outcome, stream: StreamKey
    ) -> Any:
        for number, geometry in expected.filled.items():
            self._fill(arguments.tensors[number], geometry, stream)
        operands = self._with_host_values(arguments)
        args, kwargs = arguments.with_tensors(operands)
        made: list[torch.Tensor] = []

        def make(geometry: Geometry) -> torch.Tensor:
            made.append(self.memory.empty(geometry, stream))
            return made[-1]

        def run() -> None:
            values = tensors_in(func(*args, **kwargs))
            own = [value for value in values if not any(value is other for other in operands)]
            for tensor, value in zip(made, own):
                tensor.copy_(value)

        with self.launcher.lock:
            result = arguments.made(expected.result, make)
            writes = [*written(func, args, kwargs), *made]
            seconds = self._speed.seconds_for(func, args, kwargs, result)
            self._launch(str(func), run, stream, _read(func, operands), writes, seconds=seconds)
        return result

    def _run_waiting(self, func: Any, arguments: Arguments, stream: StreamKey) -> Any:
        operands = self._with_host_values(arguments)
        args, kwargs = arguments.with_tensors(operands)
        results: list[Any] = []

        def run() -> None:
            try:
                results.append(func(*args, **kwargs))
            except Exception as error:  # noqa: BLE001  # it is raised where the host waits
                results.append(error)

        writes = written(func, args, kwargs)
        task = self._launch(str(func), run, stream, _read(func, operands), writes)
        self.launcher.wait_for(task)
        # Random numbers are drawn in order, for which a real device would not wait.
        if torch.Tag.nondeterministic_seeded not in func.tags:
            self.launcher.wait(self.launcher.record(stream))
        if isinstance(results[0], Exception):
            raise results.pop()
        indices = {id(tensor): index for index, tensor in enumerate(operands)}

        def upload(tensor: torch.Tensor) -> torch.Tensor:
            index = indices.get(id(tensor))
            return self.upload(tensor, stream[0]) if index is None else arguments.tensors[index]

        return exchanged(results[0], upload)

    def _change_view(self, func: Any, args: Any, kwargs: dict[str, Any], device: int) -> Any:
        """Change a tensor's shape in place, once no operation that was launched needs it as it was.

        Raises:
            NotBehindTheHost: if it needs more memory then.
        """
        for task in self.launcher.last_tasks(device):
            self.launcher.wait_for(task)
        if func is not aten.resize_.default:
            return func(*args, **kwargs)
        for geometry in outcome(func, Arguments(args, kwargs)).filled.values():
            self._fill(args[0], geometry, self.launcher.current(device))
        return args[0]

    def _fill(self, tensor: torch.Tensor, geometry: Geometry, stream: StreamKey) -> None:
        """Give a tensor that had no elements a shape, and memory."""
        tensor.set_(self.memory.empty(geometry, stream))  # type: ignore[call-overload]

    def _with_host_values(self, arguments: Arguments) -> list[torch.Tensor]:
        """The tensors; those of the host as they are now, as the host goes on."""
        return [
            tensor if self.memory.has(tensor) else tensor.clone() for tensor in arguments.tensors
        ]

    # Copies

    def copy(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        to: int | None,
        of: int | None,
        non_blocking: bool = False,
    ) -> None:
        """Copy between two devices, or the host (None) and one, as CUDA does.

        Between devices, it runs on the source's stream, and both streams wait for it. The host
        goes on at once if it asks to, and its memory is pinned. Memory of the host that is not
        pinned is read at once.
        """
        device = to if of is None else of
        assert device is not None
        stream = self.launcher.current(device)
        host = source if of is None else target if to is None else None
        waits = host is not None and not (
            non_blocking and (host is source or self.pinned.has(host))
        )
        if non_blocking and host is source and not self.pinned.has(source):
            source = source.clone()
        if to is not None and to != device:
            self.launcher.order(stream, self.launcher.record(self.launcher.current(to)))
        self._launch(
            *("copy_", lambda: target.copy_(source), stream, [source], [target]),
            is_copy=to != of,
            seconds=0.0 if to == of else self._speed.seconds_to_copy(target),
        )
        if to is not None and to != device:
            self.launcher.order(self.launcher.current(to), self.launcher.record(stream))
        if waits:
            self.launcher.wait(self.launcher.record(stream))

    def converted(
        self,
        source: torch.Tensor,
        of: int,
        to: int | None,
        options: dict[str, Any],
        non_blocking: bool,
    ) -> torch.Tensor:
        """``.to``: a copy on another device, or the host (None), also of another dtype."""
        geometry = outcome(aten._to_copy.default, Arguments([source], options)).result
        if to is None:
            copied = torch.empty_strided(geometry.shape, geometry.stride, dtype=geometry.dtype)
            if non_blocking:  # torch takes pinned memory for it
                self.pinned.add(copied)
        else:
            copied = self.memory.empty(geometry, self.launcher.current(to))
        self.copy(copied, source, to, of, non_blocking)
        return copied

    def upload(self, values: torch.Tensor, device: int) -> torch.Tensor:
        """Values that no one else has, put into memory of a device.

        Raises:
            NotBehindTheHost: if they are sparse.
        """
        stream = self.launcher.current(device)
        values = values.resolve_conj().resolve_neg()
        uploaded = self.memory.empty(geometry_of(values), stream)
        self._launch("upload", lambda: uploaded.copy_(values), stream, [], [uploaded])
        return uploaded

    def adopted(self, tensor: torch.Tensor, device: int) -> torch.Tensor:
        """A tensor that was made on the host, and is a device's from now on."""
        return tensor

    def resolved(self, tensor: torch.Tensor, device: int) -> torch.Tensor:
        """A copy of a conjugated or negated view, as values."""
        geometry = Geometry(tensor.shape, tensor.resolve_conj().stride(), tensor.dtype)
        copied = self.memory.empty(geometry, self.launcher.current(device))
        self.copy(copied, tensor, device, device)
        return copied

    def read(self, tensor: torch.Tensor, device: int) -> torch.Tensor:
        """The tensor, once its current stream has got to all that was launched there."""
        self.launcher.wait(self.launcher.record(self.launcher.current(device)))
        self.host_uses("a read of its values", [tensor], ())
        return tensor

    # Order

    def host_uses(
        self, name: str, reads: Iterable[torch.Tensor], writes: Iterable[torch.Tensor]
    ) -> None:
        """Check that the host's own reads and writes are ordered.

        Raises:
            RaceError: if an operation on a device may still use the memory.
        """
        self.launcher.host_uses(name, self.memory.of(reads), self.memory.of(writes))

    def keep_busy(self, device: int, seconds: float) -> None:
        """Launch something that takes so long on a device's current stream."""
        stream = self.launcher.current(device)
        self.launcher.launch("keep_busy", lambda: None, stream, seconds=seconds)

    def _launch(
        self,
        name: str,
        run: Callable[[], object],
        stream: StreamKey,
        reads: Iterable[torch.Tensor],
        writes: Iterable[torch.Tensor],
        is_copy: bool = False,
        seconds: float = 0.0,
    ) -> Task:
        """Launch an operation on tensors."""
        self.launcher.free_first()
        with self.launcher.lock:
            uses = self.memory.of(reads), self.memory.of(writes)
            return self.launcher.launch(name, run, stream, *uses, is_copy, seconds)


def _read(func: Any, operands: list[torch.Tensor]) -> list[torch.Tensor]:
    """The operands whose values an operation reads."""
    return [] if func in _OF_A_SHAPE else operands


def _must_wait(func: Any, arguments: Arguments) -> bool:
    """Whether an operation's result is a number, or its shape depends on values."""
    if func is _CPU_ATTENTION:
        return False
    if func is aten.index.Tensor:  # numbers give a shape without being known
        return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in arguments.tensors[1:])
    return bool(_WAITING_TAGS & set(func.tags))

"""Devices that run behind the host, as real ones do.

An operation is given to a stream of its device (`giving`), and the host goes on: it knows what the
result will look like (`geometry`), and has memory for it (`device_memory`). The device's thread
runs it when the stream gets there (`queues`). What the operation uses is compared with who used it
before (`ordering`), so that a race is an error where the host gives the second operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from tl_devicefix.simulation.device_memory import DeviceMemory
from tl_devicefix.simulation.geometry import (
    Geometry,
    Given,
    NoSparseTensors,
    Outcome,
    Tensors,
    geometry_of,
    outcome,
    written,
)
from tl_devicefix.simulation.giving import Giving
from tl_devicefix.simulation.ordering import StreamKey
from tl_devicefix.simulation.pinned import Pinned
from tl_devicefix.simulation.pool import Block
from tl_devicefix.simulation.queues import Task
from tl_devicefix.simulation.speed import NO_TIME, Speed
from tl_devicefix.simulation.timeline import Timeline

aten = torch.ops.aten

_WITHOUT_VALUES = {aten.empty_like.default, aten.new_empty.default, aten.new_empty_strided.default}
_OF_A_SHAPE = {
    *(aten.zeros_like.default, aten.ones_like.default, aten.full_like.default),
    *(aten.rand_like.default, aten.randn_like.default),
    *(aten.new_zeros.default, aten.new_ones.default, aten.new_full.default),
}
"""What reads no value of the tensor that it is given, which may be on another device."""
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

    Attributes:
        giving: its streams.
        memory: its memory.
        pinned: the host's pinned memory.
    """

    has_streams = True

    def __init__(self, n_devices: int, seed: int, speed: Speed) -> None:
        self.pinned = Pinned()
        self.giving = Giving(n_devices, seed, takes_time=speed != NO_TIME)
        self.memory = DeviceMemory(self.giving, self.pinned)
        self._speed = speed

    # Memory

    @property
    def timeline(self) -> Timeline:
        """What took time on the devices."""
        return self.giving.timeline

    def allocate(self, geometry: Geometry, device: int) -> torch.Tensor:
        """A tensor in memory of a device, without values of its own."""
        return self.memory.empty(geometry, self.giving.current(device))

    def block_of(self, tensor: torch.Tensor, device: int) -> Block:
        """The memory of a tensor that is on a device from now on."""
        return self.memory.block_of(tensor, device)

    def free(self, block: Block) -> None:
        """Let memory be handed out again. This may be called in the middle of anything."""
        self.memory.free(block)

    def synchronize(self, device: int) -> None:
        """Wait for all that was given to a device."""
        self.giving.synchronize(device)

    # Operations

    def run(self, func: Any, args: Any, kwargs: dict[str, Any], device: int) -> Any:
        """Give an operation to a device's current stream; return what it will have given.

        One whose result's shape, or that itself, depends on values waits for them.
        """
        if func.is_view or func is aten._unsafe_view.default:
            return func(*args, **kwargs)
        if torch.Tag.inplace_view in func.tags:
            return self._change_view(func, args, kwargs, device)
        tensors = Tensors(args, kwargs)
        stream = self.giving.current(device)
        if _must_wait(func, tensors):
            return self._run_waiting(func, tensors, stream)
        try:
            expected = outcome(func, tensors)
        except NoSparseTensors:
            raise
        except Exception:  # noqa: BLE001  # of zeros, or of any values: the values tell
            return self._run_waiting(func, tensors, stream)
        if func in _WITHOUT_VALUES:
            return self.memory.empty(expected.result, stream)
        return self._run_behind(func, tensors, expected, stream)

    def _run_behind(self, func: Any, tensors: Tensors, expected: Outcome, stream: StreamKey) -> Any:
        for index, geometry in expected.resized.items():
            self._give_room(tensors.all[index], geometry, stream)
        given = self._with_host_values(tensors)
        made: list[torch.Tensor] = []

        def make(result: Any) -> Any:
            if isinstance(result, Geometry):
                made.append(self.memory.empty(result, stream))
                return made[-1]
            if isinstance(result, Given):
                return tensors.all[result.number]
            if isinstance(result, (list, tuple)):
                return type(result)(make(each) for each in result)
            return result

        with self.giving.lock:
            result = make(expected.result)
            args, kwargs = tensors.arguments(given)

            def run() -> None:
                for there, value in zip(made, _tensors_made(func(*args, **kwargs), given)):
                    there.copy_(value)

            changed = written(func, args, kwargs)
            seconds = self._speed.seconds_for(func, args, kwargs, result)
            self._give(
                str(func), run, stream, _read(func, given), [*changed, *made], seconds=seconds
            )
        return result

    def _run_waiting(self, func: Any, tensors: Tensors, stream: StreamKey) -> Any:
        given = self._with_host_values(tensors)
        args, kwargs = tensors.arguments(given)
        results: list[Any] = []

        def run() -> None:
            try:
                results.append(func(*args, **kwargs))
            except Exception as error:  # noqa: BLE001  # it is raised where the host waits
                results.append(error)

        changed = written(func, args, kwargs)
        task = self._give(str(func), run, stream, _read(func, given), changed)
        self.giving.wait_for(task)
        # Random numbers are drawn in order, for which a real device would not wait.
        if torch.Tag.nondeterministic_seeded not in func.tags:
            self.giving.wait(self.giving.record(stream))
        if isinstance(results[0], Exception):
            raise results.pop()
        indices = {id(tensor): index for index, tensor in enumerate(given)}

        def upload(result: Any) -> Any:
            if isinstance(result, torch.Tensor):
                index = indices.get(id(result))
                return self.upload(result, stream[0]) if index is None else tensors.all[index]
            if isinstance(result, (list, tuple)):
                return type(result)(upload(each) for each in result)
            return result

        return upload(results[0])

    def _change_view(self, func: Any, args: Any, kwargs: dict[str, Any], device: int) -> Any:
        """Change a tensor's shape in place, once no operation that was given needs it as it was."""
        for task in self.giving.last_tasks(device):
            self.giving.wait_for(task)
        if func is aten.resize_.default:
            tensors = Tensors(args, kwargs)
            for index, geometry in outcome(func, tensors).resized.items():
                old = tensors.all[index]
                if geometry.nbytes > old.untyped_storage().nbytes():
                    self._give_room(old, geometry, self.giving.current(device), keep=True)
                else:
                    old.as_strided_(geometry.shape, geometry.stride)
            return args[0]
        return func(*args, **kwargs)

    def _give_room(
        self, tensor: torch.Tensor, geometry: Geometry, stream: StreamKey, keep: bool = False
    ) -> None:
        """Give a tensor a storage of another size."""
        old = tensor.detach()
        if old.untyped_storage().nbytes():  # else it was made to be given room: nothing has it
            for task in self.giving.last_tasks():
                self.giving.wait_for(task)  # those that were given have the tensor as it was
        tensor.set_(self.memory.empty(geometry, stream))  # type: ignore[call-overload]
        if keep:
            size = old.untyped_storage().nbytes() // old.element_size()
            there = tensor.as_strided((size,), (1,), 0)
            self.copy(there, old.as_strided((size,), (1,), 0), stream[0], stream[0])

    def _with_host_values(self, tensors: Tensors) -> list[torch.Tensor]:
        """The tensors; those of the host as they are now, as the host goes on."""
        return [tensor if self.memory.has(tensor) else tensor.clone() for tensor in tensors.all]

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
        goes on at once if it asks to, and its memory is pinned. What is copied to a device from
        memory that is not pinned is read at once.
        """
        device = to if of is None else of
        assert device is not None
        stream = self.giving.current(device)
        host = source if of is None else target if to is None else None
        waits = host is not None and not (
            non_blocking and (host is source or self.pinned.has(host))
        )
        if non_blocking and host is source and not self.pinned.has(source):
            source = source.clone()
        if to is not None and to != device:
            self.giving.order(stream, self.giving.record(self.giving.current(to)))
        self._give(
            *("copy_", lambda: target.copy_(source), stream, [source], [target]),
            is_copy=to != of,
            seconds=0.0 if to == of else self._speed.seconds_to_copy(target),
        )
        if to is not None and to != device:
            self.giving.order(self.giving.current(to), self.giving.record(stream))
        if waits:
            self.giving.wait(self.giving.record(stream))

    def converted(
        self,
        source: torch.Tensor,
        of: int,
        to: int | None,
        options: dict[str, Any],
        non_blocking: bool,
    ) -> torch.Tensor:
        """``.to``: a copy on another device, or the host (None), also of another dtype."""
        geometry = outcome(aten._to_copy.default, Tensors([source], options)).result
        if to is None:
            there = torch.empty_strided(geometry.shape, geometry.stride, dtype=geometry.dtype)
            if non_blocking:  # torch takes pinned memory for it
                self.pinned.add(there)
        else:
            there = self.memory.empty(geometry, self.giving.current(to))
        self.copy(there, source, to, of, non_blocking)
        return there

    def upload(self, values: torch.Tensor, device: int) -> torch.Tensor:
        """Values that no one else has, put into memory of a device.

        Raises:
            NoSparseTensors: if they are sparse.
        """
        stream = self.giving.current(device)
        values = values.resolve_conj().resolve_neg()
        there = self.memory.empty(geometry_of(values), stream)
        self._give("upload", lambda: there.copy_(values), stream, [], [there])
        return there

    def adopted(self, tensor: torch.Tensor, device: int) -> torch.Tensor:
        """A tensor that was made on the host, and is a device's from now on."""
        return tensor

    def resolved(self, tensor: torch.Tensor, device: int) -> torch.Tensor:
        """A copy of a conjugated or negated view, as values."""
        geometry = Geometry(tensor.shape, tensor.resolve_conj().stride(), tensor.dtype)
        there = self.memory.empty(geometry, self.giving.current(device))
        self.copy(there, tensor, device, device)
        return there

    def read(self, tensor: torch.Tensor, device: int) -> torch.Tensor:
        """The tensor, once its current stream has got to what was given to it."""
        self.giving.wait(self.giving.record(self.giving.current(device)))
        self.host_uses("a read of its values", [tensor], ())
        return tensor

    # What is used

    def host_uses(
        self, name: str, reads: Iterable[torch.Tensor], writes: Iterable[torch.Tensor]
    ) -> None:
        """Check that what the host reads and writes itself is ordered.

        Raises:
            RaceError: if an operation that was given to a device may still use it.
        """
        self.giving.host_uses(name, self.memory.of(reads), self.memory.of(writes))

    def keep_busy(self, device: int, seconds: float) -> None:
        """Give a device's current stream something that takes so long."""
        self.giving.give("keep_busy", lambda: None, self.giving.current(device), seconds=seconds)

    def _give(
        self,
        name: str,
        run: Callable[[], object],
        stream: StreamKey,
        reads: Iterable[torch.Tensor],
        writes: Iterable[torch.Tensor],
        is_copy: bool = False,
        seconds: float = 0.0,
    ) -> Task:
        """Give an operation on tensors to a stream."""
        self.giving.free_first()
        with self.giving.lock:
            uses = self.memory.of(reads), self.memory.of(writes)
            return self.giving.give(name, run, stream, *uses, is_copy, seconds)


def _read(func: Any, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors given to an operation whose values it reads."""
    return [] if func in _OF_A_SHAPE else given


def _must_wait(func: Any, tensors: Tensors) -> bool:
    """Whether an operation's result is a number, or its shape depends on values."""
    if func is _CPU_ATTENTION:
        return False
    if func is aten.index.Tensor:  # numbers give a shape without being known
        return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors.all[1:])
    return bool(_WAITING_TAGS & set(func.tags))


def _tensors_made(result: Any, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors of a result that were not among those given, in order."""
    if isinstance(result, torch.Tensor):
        return [] if any(result is each for each in given) else [result]
    if isinstance(result, (list, tuple)):
        return [tensor for each in result for tensor in _tensors_made(each, given)]
    return []

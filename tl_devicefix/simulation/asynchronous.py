"""Devices that run behind the host, as real ones do.

An operation is given to a stream of its device, and the host goes on: it knows what the result
will look like (`geometry`), and has memory for it (`pool`). The device's thread runs it when the
stream gets there (`queues`). What the operation uses is compared with who used it before
(`ordering`), so that a race is an error where the host gives the second operation.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from tl_devicefix.simulation.backward import raise_or_keep
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
from tl_devicefix.simulation.ordering import (
    HOST,
    Access,
    Clock,
    Clocks,
    Memory,
    Operation,
    RaceError,
    StreamKey,
    race,
)
from tl_devicefix.simulation.pinned import Pinned
from tl_devicefix.simulation.pool import Block, Pool
from tl_devicefix.simulation.queues import Queues, Task

aten = torch.ops.aten

_NOT_THE_USERS = tuple(
    str(Path(file).parent)
    for file in (torch.__file__, __file__)  # whose lines tell a user nothing
)
_WITHOUT_VALUES = {aten.empty_like.default, aten.new_empty.default, aten.new_empty_strided.default}
_OF_A_SHAPE = {
    *(aten.zeros_like.default, aten.ones_like.default, aten.full_like.default),
    *(aten.rand_like.default, aten.randn_like.default),
    *(aten.new_zeros.default, aten.new_ones.default, aten.new_full.default),
}
"""What reads no value of the tensor that it is given, which may be on another device."""
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
    """

    def __init__(self, n_devices: int, seed: int) -> None:
        self.pinned = Pinned()
        self._devices = range(n_devices)
        self._lock = threading.RLock()
        self._clocks = Clocks()
        self._pool = Pool()
        self._queues = Queues(n_devices, seed)
        self._last: dict[StreamKey, Task] = {}
        self._current = threading.local()
        self._blocks: dict[int, Block] = {}
        self._freed: deque[Block] = deque()  # by any thread, at any time
        self._limbo: list[tuple[Block, list[Task]]] = []
        self._errors: deque[Exception] = deque()

    # Streams

    def current(self, device: int) -> StreamKey:
        """The stream of a device that this thread of the host gives operations to."""
        return device, vars(self._current).get(str(device), 0)

    def set_current(self, stream: StreamKey) -> None:
        """Give operations to another stream of its device from now on, in this thread."""
        vars(self._current)[str(stream[0])] = stream[1]

    def record(self, stream: StreamKey) -> tuple[Task | None, Clock]:
        """How far a stream has got with what it was given: its last task, and its clock."""
        self._collect()  # what was freed before is ordered before
        with self._lock:
            return self._last.get(stream), dict(self._clocks.of(stream))

    def order(self, stream: StreamKey, after: tuple[Task | None, Clock]) -> None:
        """Have a stream wait for what was recorded."""
        task, clock = after
        self._collect()  # what was freed before is not ordered after
        with self._lock:
            self._clocks.order(stream, clock)
            if task is not None and not task.done:
                self._last[stream] = self._queues.submit(stream, lambda: None, (task,))

    def wait(self, after: tuple[Task | None, Clock]) -> None:
        """Have the host wait for what was recorded, and raise what has failed.

        Raises:
            RuntimeError: what failed on a device's thread.
            RaceError: if memory was freed too early.
        """
        task, clock = after
        self._collect()
        if task is not None:
            self._queues.wait(task)
        with self._lock:
            self._clocks.order(HOST, clock)
        self.raise_errors()

    def synchronize(self, device: int) -> None:
        """Have the host wait for all streams of a device, and raise what has failed."""
        for stream in list(self._last):
            if stream[0] == device:
                self.wait(self.record(stream))

    def raise_errors(self) -> None:
        """Raise the first of what has failed since the last time."""
        if self._errors:
            error = self._errors[0]
            self._errors.clear()
            raise_or_keep(error)

    def finish(self) -> None:
        """Run all that was given to devices, and end their threads."""
        self._collect()
        self._queues.finish()

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
        stream = self.current(device)
        if _must_wait(func, tensors):
            return self._run_waiting(func, tensors, stream)
        try:
            expected = outcome(func, tensors)
        except NoSparseTensors:
            raise
        except Exception:  # noqa: BLE001  # of zeros, or of any values: the values tell
            return self._run_waiting(func, tensors, stream)
        if func in _WITHOUT_VALUES:
            return self.empty(expected.result, stream)
        return self._run_behind(func, tensors, expected, stream)

    def _run_behind(self, func: Any, tensors: Tensors, expected: Outcome, stream: StreamKey) -> Any:
        for index, geometry in expected.resized.items():
            self._give_room(tensors.all[index], geometry, stream)
        given = self._with_host_values(tensors)
        made: list[torch.Tensor] = []

        def make(result: Any) -> Any:
            if isinstance(result, Geometry):
                made.append(self.empty(result, stream))
                return made[-1]
            if isinstance(result, Given):
                return tensors.all[result.number]
            if isinstance(result, (list, tuple)):
                return type(result)(make(each) for each in result)
            return result

        with self._lock:
            result = make(expected.result)
            args, kwargs = tensors.arguments(given)

            def run() -> None:
                for there, value in zip(made, _tensors_made(func(*args, **kwargs), given)):
                    there.copy_(value)

            changed = written(func, args, kwargs)
            self._give(str(func), run, stream, _read(func, given), [*changed, *made])
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
        self._queues.wait(task)
        # Random numbers are drawn in order, for which a real device would not wait.
        if torch.Tag.nondeterministic_seeded not in func.tags:
            self.wait(self.record(stream))
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
        for stream, task in list(self._last.items()):
            if stream[0] == device:
                self._queues.wait(task)
        if func is aten.resize_.default:
            tensors = Tensors(args, kwargs)
            for index, geometry in outcome(func, tensors).resized.items():
                old = tensors.all[index]
                if geometry.nbytes > old.untyped_storage().nbytes():
                    self._give_room(old, geometry, self.current(device), keep=True)
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
            for task in list(self._last.values()):
                self._queues.wait(task)  # those that were given have the tensor as it was
        tensor.set_(self.empty(geometry, stream))  # type: ignore[call-overload]
        if keep:
            size = old.untyped_storage().nbytes() // old.element_size()
            there = tensor.as_strided((size,), (1,), 0)
            self.copy(there, old.as_strided((size,), (1,), 0), stream[0], stream[0])

    def _with_host_values(self, tensors: Tensors) -> list[torch.Tensor]:
        """The tensors; those of the host as they are now, as the host goes on."""
        return [tensor if self.is_on_device(tensor) else tensor.clone() for tensor in tensors.all]

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
        stream = self.current(device)
        host = source if of is None else target if to is None else None
        waits = host is not None and not (
            non_blocking and (host is source or self.pinned.has(host))
        )
        if non_blocking and host is source and not self.pinned.has(source):
            source = source.clone()
        if to is not None and to != device:
            self.order(stream, self.record(self.current(to)))
        self._give("copy_", lambda: target.copy_(source), stream, [source], [target], is_copy=True)
        if to is not None and to != device:
            self.order(self.current(to), self.record(stream))
        if waits:
            self.wait(self.record(stream))

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
            there = self.empty(geometry, self.current(to))
        self.copy(there, source, to, of, non_blocking)
        return there

    def upload(self, values: torch.Tensor, device: int) -> torch.Tensor:
        """Values that no one else has, put into memory of a device.

        Raises:
            NoSparseTensors: if they are sparse.
        """
        stream = self.current(device)
        values = values.resolve_conj().resolve_neg()
        there = self.empty(geometry_of(values), stream)
        self._give("upload", lambda: there.copy_(values), stream, [], [there])
        return there

    def resolved(self, tensor: torch.Tensor, device: int) -> torch.Tensor:
        """A copy of a conjugated or negated view, as values."""
        geometry = Geometry(tensor.shape, tensor.resolve_conj().stride(), tensor.dtype)
        there = self.empty(geometry, self.current(device))
        self.copy(there, tensor, device, device)
        return there

    def read(self, tensor: torch.Tensor, device: int) -> torch.Tensor:
        """The tensor, once its current stream has got to what was given to it."""
        self.wait(self.record(self.current(device)))
        self.host_uses("a read of its values", [tensor], ())
        return tensor

    # Memory

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's memory is a device's."""
        return _address(tensor) in self._blocks

    def empty(self, geometry: Geometry, stream: StreamKey, nbytes: int = 0) -> torch.Tensor:
        """A tensor in memory that was taken for a stream, without values of its own."""
        nbytes = nbytes or geometry.nbytes
        self._collect()
        with self._lock:
            block = self._pool.take(nbytes, stream)
            block.allocated = Operation("an allocation", stream, _line())
            count = self._clocks.of(stream).get(stream, 0)
            block.memory.use(Access(block.allocated, count), writes=True, host=self._clocks.host)
            base = block.hand_out(nbytes)
            tensor = torch.empty(0, dtype=geometry.dtype)
            tensor.set_(base.untyped_storage(), 0, geometry.shape, geometry.stride)
            self._blocks[_address(tensor)] = block
        return tensor

    def block_of(self, tensor: torch.Tensor, device: int) -> Block:
        """The memory of a tensor that is on a device from now on."""
        block = self._blocks.get(_address(tensor))
        if block is None:  # of a copy that was made on the host
            block = self._blocks[_address(tensor)] = Block(0, self.current(device))
            block.base = tensor.detach()
        return block

    def free(self, block: Block) -> None:
        """Let memory be handed out again. This may be called in the middle of anything."""
        self._freed.append(block)

    def _collect(self) -> None:
        """Free what has been let go of."""
        with self._lock:
            while self._freed:
                self._free(self._freed.popleft())
            for block, tasks in list(self._limbo):
                if all(task.done for task in tasks):
                    self._limbo.remove((block, tasks))
                    block.memory = Memory()
                    block.poison()
                    self._pool.give_back(block)

    def _free(self, block: Block) -> None:
        assert block.base is not None
        del self._blocks[_address(block.base)]
        block.base = None
        if not block.nbytes:  # what is queued holds it
            return
        if block.recorded:
            streams = {*block.recorded, block.stream}
            tasks = [self._last[stream] for stream in streams if stream in self._last]
            self._limbo.append((block, tasks))
            block.recorded = set()
            return
        clock = self._clocks.of(block.stream)
        self._clocks.order(block.stream, self._clocks.host)
        other = block.memory.unordered(clock, writes=True)
        if other is not None:
            self._errors.append(_freed_too_early(block, other))
            block.memory = Memory()
        name = f"the freeing of what {block.allocated} took"
        self._put(name, block.poison, block.stream, [], [block.memory])
        self._pool.give_back(block)

    # What orders them

    def host_uses(
        self, name: str, reads: Iterable[torch.Tensor], writes: Iterable[torch.Tensor]
    ) -> None:
        """Check that what the host reads and writes itself is ordered.

        Raises:
            RaceError: if an operation that was given to a device may still use it.
        """
        with self._lock:
            operation = Operation(name, HOST, _line())
            clock = self._clocks.host
            access = Access(operation, clock[HOST])
            for memory in self._memories(reads):
                self._check(operation, memory, clock, writes=False)
                memory.use(access, writes=False, host=clock)
            for memory in self._memories(writes):
                if not self._tears(operation, memory, clock):
                    self._check(operation, memory, clock, writes=True)
                memory.use(access, writes=True, host=clock)

    def _tears(self, operation: Operation, memory: Memory, clock: Clock) -> bool:
        """Whether a write of the host changes only what is on its way to where none reads it yet.

        Who has sent for it may see that it has been changed, and send for it again.
        """
        if any(not read.is_before(clock) for read in memory.reads.values()):
            return False
        copies = [copy for copy in memory.copies if not copy.is_before(clock)]
        for copy in copies:
            there = copy.copied_to
            assert there is not None
            is_last = there.written is not None and there.written.operation is copy.operation
            if not is_last or there.reads or there.copies:
                return False
        for copy in copies:
            assert copy.copied_to is not None
            copy.copied_to.torn = str(race(operation, True, copy, wrote=False))
        return bool(copies)

    def _check(self, operation: Operation, memory: Memory, clock: Clock, writes: bool) -> None:
        other = memory.unordered(clock, writes)
        if other is not None:
            raise_or_keep(race(operation, writes, other, wrote=other is memory.written))
        if memory.torn and not writes:
            raise_or_keep(RaceError(f"{operation} reads what is wrong: {memory.torn}"))

    def _memories(self, tensors: Iterable[torch.Tensor]) -> list[Memory]:
        memories = []
        for tensor in tensors:
            block = self._blocks.get(_address(tensor))
            memory = self.pinned.memory_of(tensor) if block is None else block.memory
            if memory is not None:
                memories.append(memory)
        return memories

    def _give(
        self,
        name: str,
        run: Callable[[], object],
        stream: StreamKey,
        reads: Iterable[torch.Tensor],
        writes: Iterable[torch.Tensor],
        is_copy: bool = False,
    ) -> Task:
        """Check what an operation uses, and put it at the end of a stream."""
        self._collect()
        with self._lock:
            return self._put(
                name, run, stream, self._memories(reads), self._memories(writes), is_copy
            )

    def _put(
        self,
        name: str,
        run: Callable[[], object],
        stream: StreamKey,
        reads: list[Memory],
        writes: list[Memory],
        is_copy: bool = False,
    ) -> Task:
        operation = Operation(name, stream, _line())
        count, clock = self._clocks.start(stream), self._clocks.of(stream)
        access = Access(operation, count, writes[0] if is_copy and writes else None)
        for memory, changes in [
            *((memory, False) for memory in reads if memory not in writes),
            *((memory, True) for memory in writes),
        ]:
            self._check(operation, memory, clock, changes)
            memory.use(access, changes, self._clocks.host)

        def checked() -> None:
            try:
                with torch.no_grad():
                    run()
            except Exception as error:  # noqa: BLE001  # it is raised where the host waits
                failed = RuntimeError(f"{operation} failed: {error}")
                failed.__cause__ = error
                self._errors.append(failed)

        self._last[stream] = self._queues.submit(stream, checked, is_copy=is_copy)
        return self._last[stream]


def _address(tensor: torch.Tensor) -> int:
    return torch._C._storage_address(tensor)  # type: ignore[attr-defined,no-any-return]


def _line() -> str:
    """The line that the user's program, or the package, is at."""
    frame = sys._getframe(2)
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(_NOT_THE_USERS)
        or frame.f_code.co_name == "__torch_function__"
    ):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _freed_too_early(block: Block, other: Access) -> RaceError:
    device, stream = block.stream
    return RaceError(
        f"{other.operation} uses memory that was freed, and may be handed out again, before it has "
        f"run; it was taken by {block.allocated}: have stream {stream} of sim:{device} wait for it "
        "before the tensor goes, or call record_stream."
    )


def _read(func: Any, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors given to an operation whose values it reads."""
    return [] if func in _OF_A_SHAPE else given


def _must_wait(func: Any, tensors: Tensors) -> bool:
    """Whether an operation's result is a number, or its shape depends on values."""
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

"""Giving an operation to a stream: what it uses is checked against who used it before.

The host may have many threads, each with current streams of its own. What they give goes through
one lock here, which is never held while a thread waits for a device.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from tl_devicefix.simulation.backward import raise_or_keep
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
from tl_devicefix.simulation.queues import Queues, Task, Work
from tl_devicefix.simulation.timeline import Timeline, label_in_force

_NOT_THE_USERS = tuple(
    str(Path(file).parent)
    for file in (torch.__file__, __file__)  # whose lines tell a user nothing
)


class Giving:
    """The streams of all devices, as the host sees them. Devices are indices.

    Args:
        n_devices: how many devices.
        seed: of the delays.
        takes_time: whether operations take time; then nothing is late.

    Attributes:
        lock: held while something is given.
        clocks: of the streams and the host.
        errors: what has failed and was not raised yet.
        free_first: frees what was let go of, before something is given or recorded: so it is
            ordered before that.
    """

    def __init__(self, n_devices: int, seed: int, takes_time: bool) -> None:
        self.lock = threading.RLock()
        self.clocks = Clocks()
        self.errors: deque[Exception] = deque()
        self.free_first: Callable[[], None] = lambda: None
        self._queues = Queues(n_devices, seed, takes_time)
        self._last: dict[StreamKey, Task] = {}
        self._current = threading.local()

    @property
    def timeline(self) -> Timeline:
        """What took time."""
        return self._queues.timeline

    # Streams

    def current(self, device: int) -> StreamKey:
        """The stream of a device that this thread of the host gives operations to."""
        return device, vars(self._current).get(str(device), 0)

    def set_current(self, stream: StreamKey) -> None:
        """Give operations to another stream of its device from now on, in this thread."""
        vars(self._current)[str(stream[0])] = stream[1]

    def record(self, stream: StreamKey) -> tuple[Task | None, Clock]:
        """How far a stream has got with what it was given: its last task, and its clock."""
        self.free_first()
        with self.lock:
            return self._last.get(stream), dict(self.clocks.of(stream))

    def order(self, stream: StreamKey, after: tuple[Task | None, Clock]) -> None:
        """Have a stream wait for what was recorded."""
        task, clock = after
        self.free_first()
        with self.lock:
            self.clocks.order(stream, clock)
            if task is not None and not task.done:
                self._last[stream] = self._queues.submit(stream, lambda: None, (task,))

    # Waiting

    def wait(self, after: tuple[Task | None, Clock]) -> None:
        """Have the host wait for what was recorded, and raise what has failed.

        Raises:
            RuntimeError: what failed on a device's thread.
            RaceError: if memory was freed too early.
        """
        task, clock = after
        self.free_first()
        if task is not None:
            self._queues.wait(task)
        with self.lock:
            self.clocks.order(HOST, clock)
        self.raise_errors()

    def wait_for(self, task: Task) -> None:
        """Have this thread wait for a task, which orders nothing and raises nothing."""
        self._queues.wait(task)

    def synchronize(self, device: int) -> None:
        """Have the host wait for all streams of a device, and raise what has failed."""
        for stream in list(self._last):
            if stream[0] == device:
                self.wait(self.record(stream))

    def last_tasks(self, device: int | None = None) -> list[Task]:
        """The last task of each stream, of one device or of all."""
        last = list(self._last.items())
        return [task for stream, task in last if device is None or stream[0] == device]

    def last_tasks_on(self, streams: Iterable[StreamKey]) -> list[Task]:
        """The last task of each of some streams, where there was any."""
        return [self._last[stream] for stream in streams if stream in self._last]

    def raise_errors(self) -> None:
        """Raise the first of what has failed since the last time, in any thread's work."""
        if not self.errors:
            return
        with self.lock:
            error = self.errors[0] if self.errors else None
            self.errors.clear()
        if error is not None:
            raise_or_keep(error)

    def finish(self, hurry: bool) -> None:
        """Run all that was given to devices, in a hurry without taking time; end their threads."""
        self.free_first()
        self._queues.finish(hurry)

    # Giving

    def give(
        self,
        name: str,
        run: Callable[[], object],
        stream: StreamKey,
        reads: Sequence[Memory] = (),
        writes: Sequence[Memory] = (),
        is_copy: bool = False,
        seconds: float = 0.0,
    ) -> Task:
        """Check what an operation uses, and put it at the end of a stream.

        Args:
            name: of the operation.
            run: what it does.
            stream: where.
            reads: the memory that it reads.
            writes: the memory that it writes.
            is_copy: whether it goes to another device, or between one and the host.
            seconds: how long it takes.

        Raises:
            RaceError: if nothing orders it after who used the memory before.
        """
        with self.lock:
            operation = Operation(name, stream, line())
            count, clock = self.clocks.start(stream), self.clocks.of(stream)
            access = Access(operation, count, writes[0] if is_copy and writes else None)
            for memory, changes in [
                *((memory, False) for memory in reads if memory not in writes),
                *((memory, True) for memory in writes),
            ]:
                self._check(operation, memory, clock, changes)
                memory.use(access, changes, self.clocks.host)

            def checked() -> None:
                try:
                    with torch.no_grad():
                        run()
                except Exception as error:  # noqa: BLE001  # it is raised where the host waits
                    failed = RuntimeError(f"{operation} failed: {error}")
                    failed.__cause__ = error
                    self.errors.append(failed)

            work = Work(name, label_in_force(), seconds) if seconds else None
            self._last[stream] = self._queues.submit(stream, checked, (), is_copy, work)
            return self._last[stream]

    def host_uses(self, name: str, reads: Sequence[Memory], writes: Sequence[Memory]) -> None:
        """Check that what the host reads and writes itself is ordered.

        Raises:
            RaceError: if an operation that was given to a device may still use it.
        """
        with self.lock:
            operation = Operation(name, HOST, line())
            clock = self.clocks.host
            access = Access(operation, clock[HOST])
            for memory in reads:
                self._check(operation, memory, clock, writes=False)
                memory.use(access, writes=False, host=clock)
            for memory in writes:
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


def line() -> str:
    """The line that the user's program, or the package, is at."""
    frame = sys._getframe(2)
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(_NOT_THE_USERS)
        or frame.f_code.co_name == "__torch_function__"
    ):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"

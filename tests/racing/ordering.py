"""The order of operations on streams and the host, and the races between them.

The n-th operation of a stream has the number n. The clock of a stream, or of the host, has for each
stream the number up to which operations are done before what comes next:

    launch on a stream      its clock takes in the host's, and its own number grows by one
    wait_event, wait_stream the stream's clock takes in the other's, as it was when recorded
    synchronize             the host's clock takes in the stream's

Two uses of a memory, one of which writes, are a race if the later one's clock lacks the earlier.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from torch.utils._python_dispatch import _disable_current_modes

from tl_devicefix.simulation.backward import raise_or_keep

StreamKey = tuple[int, int]
"""A device's index, and the number of a stream on it."""
Clock = dict[StreamKey, int]

HOST: StreamKey = (-1, 0)
"""The host is one here, however many threads it has."""


class RaceError(Exception):
    """Nothing orders two uses of a memory. No RuntimeError, because code may handle torch's."""


class Operation(NamedTuple):
    """An operation of a stream or the host, launched by a line of the test."""

    name: str
    stream: StreamKey
    line: str
    number: int
    copied_to: Memory | None = None  # of a copy between devices, or a device and the host

    def is_before(self, clock: Clock) -> bool:
        """Return True if this is done before what comes next on the clock's stream."""
        return clock.get(self.stream, 0) >= self.number

    def __str__(self) -> str:
        device, number = self.stream
        place = "the host" if self.stream == HOST else f"stream {number} of sim:{device}"
        return f"{self.name} on {place} ({self.line})"


def _line() -> str:
    """Return the line that the test is at."""
    frame = sys._getframe()
    while frame.f_back is not None and "/test_" not in frame.f_code.co_filename:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


@dataclass(eq=False, slots=True)
class Memory:
    """The uses of one storage: its last write, and the reads since then."""

    written: Operation | None = None
    reads: list[Operation] = field(default_factory=list)
    torn: str = ""  # why its values are wrong: its copy's source was changed meanwhile
    allocated: Operation | None = None  # on whose stream it is freed; None if pinned
    is_recorded: bool = False  # by `record_stream`, for another stream

    def unordered(self, clock: Clock, writes: bool) -> Operation | None:
        """Return a use that a write, or a read, with this clock would race with."""
        uses = [self.written, *(self.reads if writes else ())]
        return next((use for use in uses if use is not None and not use.is_before(clock)), None)

    def use(self, operation: Operation, clock: Clock, writes: bool, host: Clock) -> None:
        """Raise if the operation races with an earlier use; else remember it."""
        other = self.unordered(clock, writes)
        if other is not None:
            raise_or_keep(_race(operation, writes, other, wrote=other is self.written))
        if self.torn and not writes:
            raise_or_keep(RaceError(f"{operation} reads a copy that is wrong: {self.torn}"))
        if writes:
            self.written, self.reads, self.torn = operation, [], ""
        else:  # what the host has waited for races with nothing any more
            self.reads = [*(read for read in self.reads if not read.is_before(host)), operation]

    def tear(self, operation: Operation, host: Clock) -> None:
        """Let a write of the host spoil copies that are on their way, if nobody has read them yet.

        That is no race yet, because whoever asked for the copies may drop them and copy again.
        """
        copies = [(read, read.copied_to) for read in self.reads if not read.is_before(host)]
        if any(to is None or to.written is not copy or to.reads for copy, to in copies):
            return
        for copy, to in copies:
            assert to is not None
            to.torn = str(_race(operation, True, copy, wrote=False))
        self.reads = []


def _race(operation: Operation, writes: bool, other: Operation, wrote: bool) -> RaceError:
    verb, did = ("writes" if writes else "reads"), ("writes" if wrote else "reads")
    return RaceError(
        f"{operation} {verb} memory that {other} {did}, and nothing orders it after that: have its "
        "stream wait (wait_stream, wait_event), or synchronize, before it."
    )


def _advance(clock: Clock, after: Clock) -> None:
    for stream, number in after.items():
        clock[stream] = max(clock.get(stream, 0), number)


class Launcher:
    """The streams of all devices, as the host sees them: it launches operations there, and waits.

    Attributes:
        freed: memory of tensors that are gone; it is freed before the next launch.
        copies: the stream of each copy between devices, or between a device and the host.
    """

    def __init__(self) -> None:
        self.freed: deque[Memory] = deque()
        self.copies: list[StreamKey] = []
        self._lock = threading.RLock()  # never held while a thread computes
        self._host: Clock = {HOST: 1}
        self._clocks: dict[StreamKey, Clock] = {HOST: self._host}
        self._error: Exception | None = None  # the first one of freed memory, until it is raised
        self._arriving: list[tuple[Operation, Callable[[], object]]] = []
        self._current = threading.local()

    def current(self, device: int) -> StreamKey:
        """Return the stream of a device that this thread launches operations on."""
        return device, vars(self._current).get(str(device), 0)

    def set_current(self, stream: StreamKey) -> None:
        vars(self._current)[str(stream[0])] = stream[1]

    def record(self, stream: StreamKey) -> Clock:
        """Return the clock of a stream, as it is now."""
        with self._settled():
            return dict(self._clock_of(stream))

    def order(self, stream: StreamKey, after: Clock) -> None:
        """Have a stream wait for what was recorded."""
        with self._settled():
            _advance(self._clock_of(stream), after)

    def wait(self, after: Clock) -> None:
        """Have the host wait for what was recorded, and raise what failed."""
        with self._settled():
            _advance(self._host, after)
            self.arrive(after)
            error, self._error = self._error, None
        if error is not None:
            raise_or_keep(error)

    def has_waited(self, after: Clock) -> bool:
        """Return True if the host has waited for what was recorded."""
        return all(self._host.get(stream, 0) >= number for stream, number in after.items())

    def synchronize(self, device: int | None = None) -> None:
        """Have the host wait for all streams, of one device or of all."""
        for stream in list(self._clocks):
            if stream != HOST and device in (None, stream[0]):
                self.wait(self.record(stream))

    def launch(
        self,
        name: str,
        stream: StreamKey,
        reads: Sequence[Memory],
        writes: Sequence[Memory],
        is_copy: bool = False,
    ) -> Operation:
        """Put an operation at the end of a stream, and check the memory that it uses."""
        with self._settled():
            clock = self._clock_of(stream)
            _advance(clock, self._host)
            clock[stream] = clock.get(stream, 0) + 1
            # Because the host does not wait: what it does next is not before the operation.
            self._host[HOST] += 1
            target = writes[0] if is_copy and writes else None
            operation = Operation(name, stream, _line(), clock[stream], target)
            self._use(operation, clock, reads, writes)
            return operation

    def allocate(self, stream: StreamKey) -> Operation:
        """Return what takes memory, which earlier operations of the stream may still use."""
        with self._settled():
            number = self._clock_of(stream).get(stream, 0)
            return Operation("an allocation", stream, _line(), number)

    def host_uses(self, name: str, reads: Sequence[Memory], writes: Sequence[Memory]) -> None:
        """Check the memory that an operation of the host uses."""
        with self._lock:
            operation = Operation(name, HOST, _line(), self._host[HOST])
            for memory in writes:
                memory.tear(operation, self._host)
            self._use(operation, self._host, reads, writes)

    def _use(
        self, operation: Operation, clock: Clock, reads: Sequence[Memory], writes: Sequence[Memory]
    ) -> None:
        for memory in reads:
            if memory not in writes:
                memory.use(operation, clock, False, self._host)
        for memory in writes:
            memory.use(operation, clock, True, self._host)

    def arrive_later(self, copy: Operation, write: Callable[[], object]) -> None:
        """Have `write` called when the host waits for a copy: its values arrive then."""
        with self._lock:
            self._arriving.append((copy, write))

    def arrive(self, clock: Clock) -> None:
        """Write the values of copies that are done before what comes next on a clock's stream."""
        with self._lock, _disable_current_modes():  # because these are no operations of the host
            waiting, self._arriving = self._arriving, []
            for copy, write in waiting:
                if copy.is_before(clock):
                    write()
                else:
                    self._arriving.append((copy, write))

    def _clock_of(self, stream: StreamKey) -> Clock:
        return self._clocks.setdefault(stream, {})

    @contextmanager
    def _settled(self) -> Iterator[None]:
        """Within it, this thread has the lock, and memory of tensors that are gone is freed."""
        with self._lock:
            while self.freed:
                self._free(self.freed.popleft())
            yield

    def _free(self, memory: Memory) -> None:
        """Note if another stream may still use memory that its own stream hands out again."""
        if memory.is_recorded or memory.allocated is None:
            return
        device, number = stream = memory.allocated.stream
        clock = self._clock_of(stream)
        _advance(clock, self._host)
        other = memory.unordered(clock, writes=True)
        if other is not None and self._error is None:
            self._error = RaceError(
                f"{other} uses memory that was freed, and may be handed out again, before it has "
                f"run; it was taken by {memory.allocated}: have stream {number} of sim:{device} "
                "wait for it before the tensor goes, or call record_stream."
            )

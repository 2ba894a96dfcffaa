"""The order of operations on streams and the host, and the races between them.

A clock says, of each stream and of the host, how far it is known to have got. An operation that
uses memory which another writes has to have the other one in its clock; else nothing orders them,
and on a real device the result depends on which is faster. The host is one here, however many
threads it has.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch.utils._python_dispatch import _disable_current_modes

from tl_devicefix.simulation.backward import raise_or_keep

StreamKey = tuple[int, int]
"""A device's index, and the number of a stream on it."""
Clock = dict[StreamKey, int]

HOST: StreamKey = (-1, 0)


class RaceError(Exception):
    """Nothing orders two uses of a memory. No RuntimeError, which code for torch's may handle."""


class Operation(NamedTuple):
    name: str
    where: StreamKey
    line: str

    def __str__(self) -> str:
        device, stream = self.where
        place = "the host" if self.where == HOST else f"stream {stream} of sim:{device}"
        return f"{self.name} on {place} ({self.line})"


def line() -> str:
    """The line that the test is at."""
    frame = sys._getframe(2)
    while frame.f_back is not None and "/test_" not in frame.f_code.co_filename:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


class Access(NamedTuple):
    """A use of a memory: by which operation, and how many there had been on its stream."""

    operation: Operation
    number: int
    copied_to: Memory | None = None

    def is_before(self, clock: Clock) -> bool:
        """Whether the owner of this clock is ordered after this access."""
        return clock.get(self.operation.where, 0) >= self.number


@dataclass(eq=False, slots=True)
class Memory:
    """Who used the bytes of one storage: the last write, and since then reads, and copies of it."""

    written: Access | None = None
    reads: dict[StreamKey, Access] = field(default_factory=dict)
    copies: list[Access] = field(default_factory=list)
    torn: str = ""  # why its values are not to be read: its copy's source was changed meanwhile
    allocated: Operation | None = None  # what took it, on whose stream it is freed; not if pinned
    is_recorded: bool = False  # by `record_stream`, for another stream

    def unordered(self, clock: Clock, writes: bool) -> Access | None:
        """A use that is not ordered before a write, or a read, with this clock."""
        if self.written is not None and not self.written.is_before(clock):
            return self.written
        if writes:
            for read in (*self.reads.values(), *self.copies):
                if not read.is_before(clock):
                    return read
        return None

    def use(self, access: Access, writes: bool, host: Clock) -> None:
        """Remember a use, and forget copies that the host is ordered after."""
        if writes:
            self.written, self.torn = access, ""
            self.reads.clear()
            self.copies.clear()
        elif access.copied_to is not None:
            self.copies = [copy for copy in self.copies if not copy.is_before(host)]
            self.copies.append(access)
        else:
            self.reads[access.operation.where] = access

    def check(self, operation: Operation, clock: Clock, writes: bool) -> None:
        """Raise if nothing orders an operation after who used this before."""
        other = self.unordered(clock, writes)
        if other is not None:
            raise_or_keep(_race(operation, writes, other, wrote=other is self.written))
        if self.torn and not writes:
            raise_or_keep(RaceError(f"{operation} reads a copy that is wrong: {self.torn}"))

    def tear(self, operation: Operation, clock: Clock) -> bool:
        """Whether a write of the host changes only what is being copied to where none reads it yet.

        Who has sent for it may then send for it again.
        """
        if any(not read.is_before(clock) for read in self.reads.values()):
            return False
        copies = [copy for copy in self.copies if not copy.is_before(clock)]
        targets = [copy.copied_to for copy in copies if copy.copied_to is not None]
        for copy, target in zip(copies, targets):
            is_last = target.written is not None and target.written.operation is copy.operation
            if not is_last or target.reads or target.copies:
                return False
        for copy, target in zip(copies, targets):
            target.torn = str(_race(operation, True, copy, wrote=False))
        return bool(copies)


def _race(operation: Operation, writes: bool, other: Access, wrote: bool) -> RaceError:
    verb, did = ("writes" if writes else "reads"), ("writes" if wrote else "reads")
    return RaceError(
        f"{operation} {verb} memory that {other.operation} {did}, and nothing orders it after "
        "that: have its stream wait (wait_stream, wait_event), or synchronize, before it."
    )


def _advance(clock: Clock, after: Clock) -> None:
    """Have what the owner of a clock does from now on be ordered after what another has."""
    for who, count in after.items():
        if clock.get(who, 0) < count:
            clock[who] = count


class Launcher:
    """The streams of all devices, as the host sees them: it launches operations there, and waits.

    The host may have many threads, each with current streams of its own. Devices are indices.

    Attributes:
        lock: held where something here changes, and never while a thread computes.
        freed: memory of tensors that are gone, which is freed before the next launch.
        copies: the stream of each copy from device to device, or between one and the host.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.freed: deque[Memory] = deque()
        self.copies: list[StreamKey] = []
        self._host: Clock = {HOST: 1}
        self._clocks: dict[StreamKey, Clock] = {HOST: self._host}
        self._error: Exception | None = None  # the first that was not raised yet
        self._arriving: list[tuple[StreamKey, int, Callable[[], object]]] = []
        self._current = threading.local()

    def clock_of(self, who: StreamKey) -> Clock:
        """The clock of a stream or of the host, as it is and will be."""
        return self._clocks.setdefault(who, {})

    def current(self, device: int) -> StreamKey:
        """The stream of a device that this thread of the host launches operations on."""
        return device, vars(self._current).get(str(device), 0)

    def set_current(self, stream: StreamKey) -> None:
        vars(self._current)[str(stream[0])] = stream[1]

    def record(self, stream: StreamKey) -> Clock:
        """How far a stream has got."""
        self._free()
        with self.lock:
            return dict(self.clock_of(stream))

    def order(self, stream: StreamKey, after: Clock) -> None:
        """Have a stream wait for another one to get as far as was recorded."""
        self._free()
        with self.lock:
            _advance(self.clock_of(stream), after)

    def wait(self, after: Clock) -> None:
        """Have the host wait for a stream to get as far as was recorded, and raise what failed."""
        self._free()
        with self.lock:
            _advance(self._host, after)
            self.arrive(after)
            error, self._error = self._error, None  # of any thread's operations
        if error is not None:
            raise_or_keep(error)

    def has_waited(self, after: Clock) -> bool:
        """Whether the host is ordered after what was recorded."""
        return all(self._host.get(who, 0) >= count for who, count in after.items())

    def synchronize(self, device: int | None = None) -> None:
        """Have the host wait for all streams, of one device or of all; raise what has failed."""
        for stream in list(self._clocks):
            if stream != HOST and device in (None, stream[0]):
                self.wait(self.record(stream))

    def launch(
        self,
        name: str,
        stream: StreamKey,
        reads: Sequence[Memory] = (),
        writes: Sequence[Memory] = (),
        is_copy: bool = False,
    ) -> Access:
        """Check the memory that an operation uses, and put it at the end of a stream."""
        self._free()
        with self.lock:
            operation = Operation(name, stream, line())
            clock = self.clock_of(stream)
            _advance(clock, self._host)
            clock[stream] = clock.get(stream, 0) + 1
            self._host[HOST] += 1  # what it does from now on is not ordered before the operation
            access = Access(operation, clock[stream], writes[0] if is_copy and writes else None)
            for memory, changes in [
                *((memory, False) for memory in reads if memory not in writes),
                *((memory, True) for memory in writes),
            ]:
                memory.check(operation, clock, changes)
                memory.use(access, changes, self._host)
            return access

    def allocate(self, stream: StreamKey) -> Access:
        """Have memory be taken on a stream, just now."""
        self._free()
        with self.lock:
            operation = Operation("an allocation", stream, line())
            return Access(operation, self.clock_of(stream).get(stream, 0))

    def _free(self) -> None:
        """Note whether another stream may still use memory that is freed."""
        while self.freed:
            with self.lock:
                if self.freed:
                    self._free_one(self.freed.popleft())

    def _free_one(self, memory: Memory) -> None:
        if memory.is_recorded:  # so it is kept until the other streams have used it
            return
        assert memory.allocated is not None
        stream = memory.allocated.where
        clock = self.clock_of(stream)
        _advance(clock, self._host)
        other = memory.unordered(clock, writes=True)
        if other is not None and self._error is None:
            self._error = RaceError(
                f"{other.operation} uses memory that was freed, and may be handed out again, "
                f"before it has run; it was taken by {memory.allocated}: have stream "
                f"{stream[1]} of sim:{stream[0]} wait for it before the tensor goes, or call "
                "record_stream."
            )

    def arrive_later(self, launched: Access, copy: Callable[[], object]) -> None:
        """Let the values of a copy to the host arrive when it waits for them."""
        with self.lock:
            self._arriving.append((launched.operation.where, launched.number, copy))

    def arrive(self, clock: Clock) -> None:
        """Have what a clock has arrive on the host."""
        if not self._arriving:
            return
        with self.lock:
            waiting, self._arriving = self._arriving, []
            with _disable_current_modes():  # as the host does nothing here
                for stream, number, copy in waiting:
                    if clock.get(stream, 0) >= number:
                        copy()
                    else:
                        self._arriving.append((stream, number, copy))

    def host_uses(self, name: str, reads: Sequence[Memory], writes: Sequence[Memory]) -> None:
        with self.lock:
            operation, clock = Operation(name, HOST, line()), self._host
            access = Access(operation, clock[HOST])
            for memory in reads:
                memory.check(operation, clock, writes=False)
                memory.use(access, writes=False, host=clock)
            for memory in writes:
                if not memory.tear(operation, clock):
                    memory.check(operation, clock, writes=True)
                memory.use(access, writes=True, host=clock)

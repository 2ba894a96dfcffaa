"""What runs before what: a clock for each stream and for the host, and who used a memory last.

A clock says, of each stream and of the host, how far it is known to have got. An operation that
uses memory which another writes has to have the other one in its clock; else nothing orders them,
and the result depends on which is faster. So a race is found in every run, also in one in which
the right one happened to be first. The host is one here, however many threads it has.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

StreamKey = tuple[int, int]
"""A device's index, and the number of a stream on it."""
Clock = dict[StreamKey, int]

HOST: StreamKey = (-1, 0)


class Operation(NamedTuple):
    """An operation as errors name it."""

    name: str
    where: StreamKey
    line: str

    def __str__(self) -> str:
        device, stream = self.where
        place = "the host" if self.where == HOST else f"stream {stream} of sim:{device}"
        return f"{self.name} on {place} ({self.line})"


class Access(NamedTuple):
    """A use of a memory: by which operation, and how many there had been on its stream."""

    operation: Operation
    number: int
    copied_to: Memory | None = None

    def is_before(self, clock: Clock) -> bool:
        """Whether who has this clock is ordered after this."""
        return clock.get(self.operation.where, 0) >= self.number


@dataclass(eq=False, slots=True)
class Memory:
    """Who used the bytes of one storage: the last write, and since then reads, and copies of it."""

    written: Access | None = None
    reads: dict[StreamKey, Access] = field(default_factory=dict)
    copies: list[Access] = field(default_factory=list)
    torn: str = ""
    """Why its values are not to be read, if its copy's source was changed meanwhile."""

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


class Clocks:
    """The clocks of the streams and of the host."""

    def __init__(self) -> None:
        self._of: dict[StreamKey, Clock] = {HOST: {HOST: 1}}
        self._waits = 0  # how often the host has learned how far a stream has got
        self._seen: dict[StreamKey, int] = {}  # how many of these each stream has in its clock

    def of(self, who: StreamKey) -> Clock:
        """The clock of a stream or of the host, as it is and will be."""
        return self._of.setdefault(who, {})

    def start(self, stream: StreamKey) -> int:
        """Begin an operation that the host gives to a stream; return its count there."""
        host, clock = self._of[HOST], self.of(stream)
        self.order_after_host(stream)
        clock[stream] = clock.get(stream, 0) + 1
        host[HOST] += 1  # what the host does from now on is not ordered before the operation
        return clock[stream]

    @property
    def host(self) -> Clock:
        """The host's clock."""
        return self._of[HOST]

    def order_after_host(self, stream: StreamKey) -> None:
        """Have a stream be ordered after what the host has got to; cheap, as each operation is."""
        if self._seen.get(stream) == self._waits:
            self.of(stream)[HOST] = self._of[HOST][HOST]
            return
        self.order(stream, self._of[HOST])
        self._seen[stream] = self._waits

    def order(self, who: StreamKey, after: Clock) -> None:
        """Have what ``who`` does from now on be ordered after what a clock has."""
        self._waits += who == HOST
        clock = self.of(who)
        for other, count in after.items():
            if clock.get(other, 0) < count:
                clock[other] = count


class RaceError(Exception):
    """Two operations use a memory, and nothing orders them.

    It is no RuntimeError, so that what handles errors of torch leaves it alone.
    """


def race(operation: Operation, writes: bool, other: Access, wrote: bool) -> RaceError:
    """The error for two operations on one memory that nothing orders."""
    verb, did = ("writes" if writes else "reads"), ("writes" if wrote else "reads")
    return RaceError(
        f"{operation} {verb} memory that {other.operation} {did}, and nothing orders it after "
        "that: have its stream wait (wait_stream, wait_event), or synchronize, before it."
    )

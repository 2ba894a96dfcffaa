"""The order of operations on streams and the host, and the races between them.

A timeline (a stream, or the host) numbers its operations. Its clock says, for each timeline, the
number of the last operation that is done before its own next one:

    launch on a stream      its clock takes in the host's, and its own number grows by one
    wait_event, wait_stream the stream's clock takes in the other's, as it was when recorded
    synchronize             the host's clock takes in the stream's

`ends` is when a timeline's last operation ends, if each takes one unit of time, and the host none.

Two uses of the same memory, one of which writes, are a race if the later one's clock lacks the
earlier one's number.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

import torch

from tl_devicefix.simulation.backward import raise_or_keep
from tl_devicefix.simulation.executor import dense_tensors

_lock = threading.RLock()
"""Guards all clocks and memories; never held while a thread computes."""


class RaceError(Exception):
    """Nothing orders two uses of a memory. Not a RuntimeError, which our code may catch."""


class Timeline:
    """A stream, or the host with all of its threads: it runs operations in order."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock: Counter[Timeline] = Counter()
        self.last: Operation | None = None
        self.ends = 0

    def wait_stream(self, other: Timeline) -> None:
        """Make the next operation here wait for another timeline so far, or for an event."""
        with _lock:
            _check_freed()
            self.clock |= other.clock
            self.ends = max(self.ends, other.ends)

    wait_event = wait_stream

    def record_event(self) -> Timeline:
        """Return this point as an event: a timeline that gets no operations."""
        event = Timeline(self.name)
        event.wait_stream(self)
        return event

    def synchronize(self) -> None:
        HOST.wait_stream(self)

    def launch(self, name: str, reads: object, writes: object) -> None:
        """Put an operation at the end, and check the memory of the tensors that it uses."""
        with _lock:
            self.wait_stream(HOST)
            self.clock[self] += 1
            self.ends += 1
            self.last = Operation(name, self, self.clock[self])
            written = memories_of(writes)
            for memory in memories_of(reads):
                if memory not in written:
                    memory.use(self.last, "reads")
            for memory in written:
                memory.use(self.last, "writes")


HOST = Timeline("the host")


@dataclass(eq=False)
class Operation:
    """An operation, and its number on its timeline."""

    name: str
    timeline: Timeline
    number: int
    was_used: bool = False  # another operation read what it wrote
    torn: str = ""  # why its result is wrong: the host changed its input too early

    def is_before(self, clock: Counter[Timeline]) -> bool:
        """Return True if this is done before the next operation on the clock's timeline."""
        return clock[self.timeline] >= self.number

    def __str__(self) -> str:
        return f"{self.name} on {self.timeline.name}"


class Memory:
    """The uses of one storage that the host has not waited for: the last write, and reads since.

    New memory of a stream (None: pinned memory) may still be used by the stream's last operation,
    because it is handed out again at once.
    """

    def __init__(self, stream: Any = None) -> None:
        self.stream = stream
        self.uses = [(stream.last, "writes")] if stream is not None and stream.last else []
        self.is_recorded = False  # by `record_stream`, for another stream

    def use(self, operation: Operation, verb: str) -> None:
        """Raise if an operation that "reads" or "writes" races with an earlier use; remember it."""
        for other, did in self.uses:
            if verb == did == "reads":
                continue
            if other.is_before(operation.timeline.clock):
                if verb == "reads" and other.torn:
                    raise_or_keep(RaceError(f"{operation} reads what is wrong: {other.torn}"))
                other.was_used |= verb == "reads"
                continue
            race = (
                f"{operation} {verb} memory that {other} {did}, and nothing orders it after that: "
                "have its stream wait (wait_stream, wait_event), or synchronize, before it."
            )
            if operation.timeline is not HOST or did == "writes" or other.was_used:
                raise_or_keep(RaceError(race))
            other.torn = race  # no race yet: the copy may be dropped, and made again
        kept = self.uses if verb == "reads" else []
        self.uses = [use for use in kept if not use[0].is_before(HOST.clock)]
        self.uses.append((operation, verb))

    def __del__(self) -> None:  # may run in any thread, at any point
        if self.stream is not None and not self.is_recorded:
            _freed.append(self)


_HELD = "_racing_memory"
"""An attribute of storages; torch keeps a storage's object for as long as the storage."""
_freed: deque[Memory] = deque()


def hold(tensor: torch.Tensor, memory: Memory) -> torch.Tensor:
    """Watch the memory of a tensor until it is freed."""
    vars(tensor.untyped_storage())[_HELD] = memory
    return tensor


def memories_of(tensors: object) -> list[Memory]:
    """Return the watched memory of these tensors: a device's, or pinned."""
    held = (vars(it.untyped_storage()).get(_HELD) for it in dense_tensors(tensors))
    return [memory for memory in held if memory is not None]


def _check_freed() -> None:
    """Raise if another stream may still use memory that its own stream hands out again."""
    while _freed:
        memory = _freed.popleft()
        for use, _ in memory.uses:
            if not use.is_before(memory.stream.clock | HOST.clock):
                error = RaceError(
                    f"{use} uses memory that was freed, and may be handed out again, before it "
                    f"has run: have {memory.stream.name} wait for it, or call record_stream."
                )
                raise_or_keep(error)

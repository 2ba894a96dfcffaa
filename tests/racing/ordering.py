"""The order of operations on streams and the host, and the races between them.

A timeline (a stream, or the host) numbers its operations. Its clock has for each timeline the
number up to which operations are done before what comes next:

    launch on a stream      its clock takes in the host's, and its own number grows by one
    wait_event, wait_stream the stream's clock takes in the other's, as it was when recorded
    synchronize             the host's clock takes in the stream's

Two uses of a memory, one of which writes, are a race if the later one's clock lacks the earlier.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from tl_devicefix.simulation.backward import raise_or_keep
from tl_devicefix.simulation.executor import dense_tensors

_lock = threading.RLock()
"""Guards all clocks and memories; never held while a thread computes."""


class RaceError(Exception):
    """Nothing orders two uses of a memory. No RuntimeError, because code may handle torch's."""


class Timeline:
    """Runs operations in order: the host, which is one however many threads it has, or a stream."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock: Counter[Timeline] = Counter()
        self.last: Operation | None = None

    def wait(self, clock: Counter[Timeline]) -> None:
        """Have what comes next here wait for what was recorded."""
        with _lock:
            _check_freed()
            self.clock |= clock

    def recorded(self) -> Counter[Timeline]:
        """Return the clock as it is now."""
        with _lock:
            return self.clock.copy()

    def launch(
        self, name: str, reads: object, writes: object, copied_to: Memory | None = None
    ) -> None:
        """Put an operation at the end, and check the memory of the tensors that it uses."""
        with _lock:
            _check_freed()
            self.clock |= HOST.clock
            self.clock[self] += 1
            self.last = Operation(name, self, _line(), self.clock[self], copied_to)
            written = memories_of(writes)
            for memory in memories_of(reads):
                if memory not in written:
                    memory.use(self.last, writes=False)
            for memory in written:
                memory.use(self.last, writes=True)


HOST = Timeline("the host")


class Operation(NamedTuple):
    """An operation of a timeline, launched by a line of the test."""

    name: str
    timeline: Timeline
    line: str
    number: int
    copied_to: Memory | None  # of a copy between devices, or a device and the host

    def is_before(self, clock: Counter[Timeline]) -> bool:
        """Return True if this is done before what comes next on the clock's timeline."""
        return clock[self.timeline] >= self.number

    def __str__(self) -> str:
        return f"{self.name} on {self.timeline.name} ({self.line})"


def _line() -> str:
    """Return the line that the test is at."""
    frame = sys._getframe()
    while frame.f_back is not None and "/test_" not in frame.f_code.co_filename:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


@dataclass(eq=False)
class Memory:
    """The uses of one storage: its last write, and the reads since then.

    New memory was used by all operations of its stream so far, because it is handed out again.
    """

    stream: Any = None  # on which it is freed; None if pinned
    written: Operation | None = None
    reads: list[Operation] = field(default_factory=list)
    torn: str = ""  # why its values are wrong: its copy's source was changed meanwhile
    is_recorded: bool = False  # by `record_stream`, for another stream

    def unordered(self, clock: Counter[Timeline], writes: bool) -> list[Operation]:
        """Return the uses that a write, or a read, with this clock would race with."""
        uses = [self.written, *(self.reads if writes else ())]
        return [use for use in uses if use is not None and not use.is_before(clock)]

    def use(self, operation: Operation, writes: bool) -> None:
        """Raise if the operation races with an earlier use; else remember it."""
        if self.torn and not writes:
            raise_or_keep(RaceError(f"{operation} reads a copy that is wrong: {self.torn}"))
        for other in self.unordered(operation.timeline.clock, writes):
            verb, did = (
                "writes" if is_write else "reads" for is_write in (writes, other is self.written)
            )
            race = (
                f"{operation} {verb} memory that {other} {did}, and nothing orders it after that: "
                "have its stream wait (wait_stream, wait_event), or synchronize, before it."
            )
            copy = other.copied_to if operation.timeline is HOST else None
            if copy is None or copy.reads:
                raise_or_keep(RaceError(race))
            else:  # no race yet, because whoever asked for the copy may drop it and copy again
                copy.torn = race
        if writes:
            self.written, self.reads, self.torn = operation, [], ""
        else:  # what the host has waited for races with nothing any more
            self.reads = [
                *(read for read in self.reads if not read.is_before(HOST.clock)),
                operation,
            ]


class _Held:
    """Frees the memory of a storage with it."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    def __del__(self) -> None:  # by any thread, in the middle of anything
        _freed.append(self.memory)


_HELD = "_racing_memory"
"""An attribute of storages; torch keeps a storage's object for as long as the storage."""
_freed: deque[Memory] = deque()


def hold(tensor: torch.Tensor, memory: Memory) -> None:
    """Watch the memory of a tensor until it is freed."""
    vars(tensor.untyped_storage())[_HELD] = _Held(memory)


def memories_of(tensors: object) -> list[Memory]:
    """Return the memory of these tensors, as far as that is a device's, or pinned."""
    helds = (vars(it.untyped_storage()).get(_HELD) for it in dense_tensors(tensors))
    return [held.memory for held in helds if held is not None]


def _check_freed() -> None:
    """Raise if another stream may still use memory that its own stream hands out again."""
    while _freed:
        memory = _freed.popleft()
        if memory.stream is None or memory.is_recorded:
            continue
        for other in memory.unordered(memory.stream.clock | HOST.clock, writes=True):
            raise_or_keep(
                RaceError(
                    f"{other} uses memory that was freed, and may be handed out again, before it "
                    f"has run: have {memory.stream.name} wait for it before the tensor goes, or "
                    "call record_stream."
                )
            )

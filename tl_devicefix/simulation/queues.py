"""A device's queue: a thread that runs the tasks which the host has put on the device's streams.

Tasks on one stream run in order. Of the streams that could go on, chance takes one, and a task may
be late, so that the order of unordered tasks depends on the seed.

Where tasks take time, chance is left out: nothing is late, and of the streams that could go on, the
one whose task was given first does. A device then computes one thing, and copies one thing, at a
time. Times are those of the device's own clock: a task ends so many seconds after it could begin,
and the thread waits until then. If it wakes up late, that is not added to the next task's time.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from tl_devicefix.simulation.timeline import Busy, Timeline

_LATE, _COPIES_LATE = 1 / 16, 1 / 2
"""The chance of an operation to be late."""
_LONGEST = 0.002
"""Seconds that it may be late."""


class Work(NamedTuple):
    """What keeps a device busy for a time."""

    name: str
    label: str
    seconds: float


class Task:
    """Something to run on a stream.

    Args:
        stream: a device's index and the stream's number.
        run: what to do.
        after: tasks of any device which are to be done before.
        is_copy: whether it is to run beside what the device computes.
        late: seconds to wait before.
        work: what it keeps the device busy with.

    Attributes:
        end: when it was done, by the clock of its device, as `time.monotonic` tells it.
        awaited_by: what is notified when it is done.
    """

    __slots__ = (
        *("_may_start", "after", "awaited_by", "done", "end", "given", "is_copy", "late"),
        *("run", "start", "stream", "work"),
    )

    def __init__(
        self,
        stream: tuple[int, int],
        run: Callable[[], object],
        after: Sequence[Task] = (),
        is_copy: bool = False,
        late: float = 0.0,
        work: Work | None = None,
    ) -> None:
        self.stream = stream
        self.run = run
        self.after = after
        self.is_copy = is_copy
        self.late = late
        self.work = work
        self.done = False
        self.awaited_by: list[threading.Condition] = []
        self.given = self.start = self.end = time.monotonic()
        self._may_start: float | None = None

    def begin(self, *free: float) -> None:
        """Say when it starts: once it was given, all that it waits for is done, and is free."""
        self.start = max(self.given, *free, *(task.end for task in self.after))
        self.end = self.start + (0.0 if self.work is None else self.work.seconds)

    def finish(self) -> None:
        """Be done, let go of what it had, and tell who waits. The lock is held."""
        self.done, self.run, self.after = True, _nothing, ()
        for waiting in self.awaited_by:
            waiting.notify_all()
        self.awaited_by.clear()

    def starts_in(self, hurry: bool) -> float | None:
        """Seconds until it may run; None where it waits for another task."""
        if not all(task.done for task in self.after):
            return None
        if hurry or not self.late:
            return 0.0
        now = time.monotonic()
        if self._may_start is None:
            self._may_start = now + self.late
        return max(0.0, self._may_start - now)


def _nothing() -> None:
    pass


class Queues:
    """The queues of a machine's devices, a thread for each.

    Attributes:
        takes_time: whether tasks take time; so it is from the first one on that does.
        hurries: whether none is waited for, however long it takes.
        entered: when they began, as `time.monotonic` tells it.
        timeline: the tasks that took time.
    """

    def __init__(self, n_devices: int, seed: int, takes_time: bool = False) -> None:
        self.takes_time = takes_time
        self.hurries = False
        self.entered = time.monotonic()
        self.timeline = Timeline()
        self.lock = threading.Lock()
        self._chance = random.Random(seed)
        self._queues = [
            _Queue(index, self, random.Random(f"{seed} {index}")) for index in range(n_devices)
        ]

    def submit(
        self,
        stream: tuple[int, int],
        run: Callable[[], object],
        after: Sequence[Task] = (),
        is_copy: bool = False,
        work: Work | None = None,
    ) -> Task:
        """Put a task at the end of a stream, a device's index and a number."""
        queue = self._queues[stream[0]]
        with self.lock:
            self.takes_time = self.takes_time or work is not None
            late = 0.0 if self.takes_time else self._lateness(is_copy)
            task = Task(stream, run, after, is_copy, late, work)
            for other in after:
                if not other.done:
                    other.awaited_by.append(queue.wake)
            queue.add(task)
        return task

    def _lateness(self, is_copy: bool) -> float:
        is_late = self._chance.random() < (_COPIES_LATE if is_copy else _LATE)
        return self._chance.uniform(0, _LONGEST) if is_late else 0.0

    def wait(self, task: Task) -> None:
        """Return when a task is done."""
        with self.lock:
            if not task.done:
                done = threading.Condition(self.lock)
                task.awaited_by.append(done)
                while not task.done:
                    done.wait()

    def finish(self, hurry: bool = False) -> None:
        """Run all tasks without delays, in a hurry without taking time, and end the threads.

        An interrupt drops the tasks.
        """
        self.hurries = hurry
        try:
            self._end(drop=False)
        except BaseException:
            self._end(drop=True)
            raise

    def _end(self, drop: bool) -> None:
        with self.lock:
            for queue in self._queues:
                queue.close(drop)
        for queue in self._queues:
            queue.thread.join()


class _Queue:
    """One device's thread, and the tasks on its streams."""

    def __init__(self, index: int, queues: Queues, chance: random.Random) -> None:
        self.wake = threading.Condition(queues.lock)
        self._queues = queues
        self._chance = chance
        self._streams: dict[int, deque[Task]] = {}
        self._ends: dict[int, float] = {}
        # The task that computes, the one that copies, and when the one before each has ended.
        self._running: list[Task | None] = [None, None]
        self._free = [0.0, 0.0]
        self._closing = False
        self.thread = threading.Thread(target=self._work, name=f"sim:{index}", daemon=True)
        self.thread.start()

    def add(self, task: Task) -> None:
        """Put a task at the end of its stream. The lock is held."""
        stream = self._streams.setdefault(task.stream[1], deque())
        stream.append(task)
        if len(stream) == 1 and self._running[task.is_copy] is None:  # else it wakes up anyway
            self.wake.notify()

    def close(self, drop: bool) -> None:
        """Have the thread end when there is nothing left. The lock is held."""
        self._closing = True
        if drop:
            for stream in self._streams.values():
                while stream:
                    stream.popleft().finish()
        self.wake.notify()

    def _work(self) -> None:
        torch.set_num_threads(torch.get_num_threads())  # a thread's own default may be another
        while (task := self._next()) is not None:
            task.run()
            if not self._queues.takes_time:
                task.end = time.monotonic()
            del task  # or what it has would live until the next one comes

    def _next(self) -> Task | None:
        """A task that may run now; None at the end."""
        with self._queues.lock:
            while True:
                self._finish_what_is_over()
                first = [stream[0] for stream in self._streams.values() if stream]
                if self._closing and not first:
                    return None
                waiting = [task for task in first if self._running[task.is_copy] is None]
                times = [(task.starts_in(self._closing), task) for task in waiting]
                ready = [task for seconds, task in times if seconds == 0]
                if ready:
                    return self._begin(self._choose(ready))
                now = time.monotonic()
                ends = [task.end - now for task in self._running if task is not None]
                until = min((*ends, *(s for s, _ in times if s is not None)), default=None)
                self.wake.wait(until if until is None else max(0.0, until))

    def _choose(self, ready: list[Task]) -> Task:
        if self._queues.takes_time:
            return min(ready, key=lambda task: task.given)
        return ready[0] if len(ready) == 1 else self._chance.choice(ready)

    def _begin(self, task: Task) -> Task:
        self._running[task.is_copy] = task
        task.begin(self._free[task.is_copy], self._ends.get(task.stream[1], 0.0))
        return task

    def _finish_what_is_over(self) -> None:
        """Finish the tasks that have run, and whose time is over."""
        now = time.monotonic()
        for is_copy, task in enumerate(self._running):
            if task is None or not (task.end <= now or task.done or self._queues.hurries):
                continue
            self._running[is_copy] = None
            if task.done:  # all was dropped meanwhile
                continue
            self._streams[task.stream[1]].popleft()
            self._free[is_copy] = self._ends[task.stream[1]] = task.end
            if task.work is not None:
                self._queues.timeline.append(self._busy(task, task.work, now))
            task.finish()

    def _busy(self, task: Task, work: Work, now: float) -> Busy:
        return Busy(
            name=work.name,
            device=torch.device("sim", task.stream[0]),
            stream=task.stream[1],
            start=task.start - self._queues.entered,
            end=task.end - self._queues.entered,
            is_copy=task.is_copy,
            label=work.label,
            late=now - task.end,
        )

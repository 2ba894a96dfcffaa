"""A device's queue: a thread that runs what the host has given to the device's streams.

What is on one stream runs in order. Of the streams that could go on, chance takes one, and an
operation may be late, so that what nothing orders happens in one order with one seed and in
another with another.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

_LATE, _COPIES_LATE = 1 / 16, 1 / 2
"""The chance of an operation to be late."""
_LONGEST = 0.002
"""Seconds that it may be late."""


class Task:
    """Something to run on a stream.

    Args:
        run: what to do.
        after: tasks of any device which are to be done before.
        late: seconds to wait before.
    """

    __slots__ = ("_start", "after", "awaited", "done", "late", "run")

    def __init__(
        self, run: Callable[[], object], after: Sequence[Task] = (), late: float = 0.0
    ) -> None:
        self.run = run
        self.after = after
        self.late = late
        self.done = False
        self.awaited = False
        self._start: float | None = None

    def finish(self) -> None:
        """Be done, and let go of what it had."""
        self.done, self.run, self.after = True, _nothing, ()

    def starts_in(self, hurry: bool) -> float | None:
        """Seconds until it may run; None where it waits for another task."""
        if not all(task.done for task in self.after):
            return None
        if hurry or not self.late:
            return 0.0
        now = time.monotonic()
        if self._start is None:
            self._start = now + self.late
        return max(0.0, self._start - now)


def _nothing() -> None:
    pass


class Queues:
    """The queues of a machine's devices, a thread for each.

    Args:
        n_devices: how many.
        seed: of what chance decides.
    """

    def __init__(self, n_devices: int, seed: int) -> None:
        self._lock = threading.Lock()
        self._host = threading.Condition(self._lock)
        self._chance = random.Random(seed)
        self._queues = [
            _Queue(index, self._lock, random.Random(f"{seed} {index}"), self._tell_all)
            for index in range(n_devices)
        ]

    def submit(
        self,
        stream: tuple[int, int],
        run: Callable[[], object],
        after: Sequence[Task] = (),
        is_copy: bool = False,
    ) -> Task:
        """Put a task at the end of a stream, a device's index and a number."""
        with self._lock:
            is_late = self._chance.random() < (_COPIES_LATE if is_copy else _LATE)
            task = Task(run, after, self._chance.uniform(0, _LONGEST) if is_late else 0.0)
            for other in after:
                other.awaited = True
            self._queues[stream[0]].add(stream[1], task)
        return task

    def wait(self, task: Task) -> None:
        """Return when a task is done."""
        with self._lock:
            task.awaited = True
            while not task.done:
                self._host.wait()

    def finish(self) -> None:
        """Run all there is, without delays, and end the threads; drop it if that is interrupted."""
        try:
            self._end(drop=False)
        except BaseException:
            self._end(drop=True)
            raise

    def _end(self, drop: bool) -> None:
        with self._lock:
            for queue in self._queues:
                queue.close(drop)
        for queue in self._queues:
            queue.thread.join()

    def _tell_all(self) -> None:
        self._host.notify_all()
        for queue in self._queues:
            queue.wake.notify()


class _Queue:
    """One device's thread, and the tasks on its streams."""

    def __init__(
        self,
        index: int,
        lock: threading.Lock,
        chance: random.Random,
        tell_all: Callable[[], None],
    ) -> None:
        self.wake = threading.Condition(lock)
        self._lock = lock
        self._chance = chance
        self._tell_all = tell_all
        self._streams: dict[int, deque[Task]] = {}
        self._closing = False
        self.thread = threading.Thread(target=self._work, name=f"sim:{index}", daemon=True)
        self.thread.start()

    def add(self, stream: int, task: Task) -> None:
        """Put a task at the end of a stream. The lock is held."""
        self._streams.setdefault(stream, deque()).append(task)
        self.wake.notify()

    def close(self, drop: bool) -> None:
        """Have the thread end when there is nothing left. The lock is held."""
        self._closing = True
        if drop:
            for stream in self._streams.values():
                while stream:
                    stream.popleft().finish()
            self._tell_all()
        self.wake.notify()

    def _work(self) -> None:
        torch.set_num_threads(torch.get_num_threads())  # a thread's own default may be another
        while (found := self._next()) is not None:
            stream, task = found
            task.run()
            with self._lock:
                if stream:  # else all was dropped meanwhile
                    stream.popleft()
                task.finish()
                if task.awaited:
                    self._tell_all()
            del found, stream, task  # or what it has would live until the next one comes

    def _next(self) -> tuple[deque[Task], Task] | None:
        """A task that may run now; None at the end."""
        with self._lock:
            while True:
                waiting = [stream for stream in self._streams.values() if stream]
                if self._closing and not waiting:
                    return None
                times = [(stream[0].starts_in(self._closing), stream) for stream in waiting]
                ready = [stream for seconds, stream in times if seconds == 0]
                if ready:
                    stream = ready[0] if len(ready) == 1 else self._chance.choice(ready)
                    return stream, stream[0]
                self.wake.wait(min((s for s, _ in times if s is not None), default=None))

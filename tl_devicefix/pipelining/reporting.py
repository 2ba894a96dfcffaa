"""Where the time of runs in flight went: each device's busy share, and what waited for a device."""

from __future__ import annotations

import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from tl_devicefix.dispatch.joining import OutsideBlocks
from tl_devicefix.dispatch.naming import line_of_user
from tl_devicefix.dispatch.scheduler import Run, Turns
from tl_devicefix.offload.copying import module_with_streams


class Waited(NamedTuple):
    """How long one line of a script had Python wait for devices, in how many calls."""

    line: str
    seconds: float
    times: int


@dataclass(frozen=True)
class FlightReport:
    """What runs in flight took. Printing it shows a table."""

    n_runs: int
    wall: float
    """Seconds from the first run's beginning until the last result was there."""
    busy: dict[torch.device, float]
    """Seconds that each device had some run's blocks, by its own clock where it has one.

    That has in it what the device waits for Python to give it, in the middle of a run's blocks.
    """
    waited: list[Waited]
    """The lines that had Python wait, the longest first; each held up its own run only."""

    @property
    def ideal(self) -> float:
        """Seconds that so many runs take at best, if a device never waits for the one before it.

        The first run passes through all devices; then the slowest one sets the pace. Runs that are
        on different devices from the start may need less, and never more than they took. On one
        device, that is what they took.
        """
        if self._is_on_one:
            return self.wall
        shares = [seconds / max(self.n_runs, 1) for seconds in self.busy.values()]
        at_best = sum(shares) + max(self.n_runs - 1, 0) * max(shares, default=0.0)
        return min(at_best, self.wall)

    @property
    def _is_on_one(self) -> bool:
        """Whether all runs were on one device, without blocks that visit: they take no turns."""
        return len(self.busy) == 1 and not any(self.busy.values())

    def __repr__(self) -> str:
        if self._is_on_one:
            rows = [f"{self.n_runs} runs in {self.wall:.2f} s, all on {next(iter(self.busy))}"]
        else:
            rows = [f"{self.n_runs} runs in {self.wall:.2f} s, at best {self.ideal:.2f} s"]
            rows += [
                f"{device!s:>12} busy {seconds:8.2f} s  {seconds / self.wall:4.0%}"
                for device, seconds in self.busy.items()
            ]
        rows += [
            f"{each.seconds:8.2f} s waited in {each.times} calls at {each.line}"
            for each in self.waited[:_MOST_LINES]
        ]
        return "\n".join(rows)


_MOST_LINES = 3


class WatchedTurns(Turns):
    """Turns of devices, and how long each has worked during them.

    Args:
        devices: the model's.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        super().__init__()
        self._began = time.perf_counter()
        self._started: dict[torch.device, Any] = {}
        self._busy: dict[torch.device, float] = dict.fromkeys(devices, 0.0)
        # Of turns whose work may not be done: when it began and ended.
        self._marks: dict[torch.device, deque[tuple[Any, Any]]] = defaultdict(deque)
        self._waited: dict[str, list[float]] = defaultdict(list)
        self._lock = threading.Lock()
        self.n_runs = 0

    def want(self, number: int) -> None:
        """Count a run, whose result is waited for."""
        self.n_runs = number + 1
        super().want(number)

    def take(
        self, run: Run, device: torch.device, weights: object | None = None, arriving: Any = None
    ) -> None:
        """Wait for a device's turn, which begins now."""
        self._end_turn(run, device)
        super().take(run, device, weights, arriving)
        self._started[device] = _mark(device)

    def give_back(self, run: Run, device: torch.device) -> None:
        """End a device's turn."""
        self._end_turn(run, device)
        super().give_back(run, device)

    def _end_turn(self, run: Run, device: torch.device) -> None:
        if self.has(run, device):
            marks = self._marks[device]
            marks.append((self._started.pop(device), _mark(device)))
            while marks and _is_done(marks[0][1]):
                self._add_busy(device)

    def _add_busy(self, device: torch.device) -> None:
        seconds = _seconds(*self._marks[device].popleft())
        self._busy[device] = self._busy.get(device, 0.0) + seconds

    def add_wait(self, line: str, seconds: float) -> None:
        """Count how long a line waited."""
        with self._lock:
            self._waited[line].append(seconds)

    def report(self) -> FlightReport:
        """All of it, up to now."""
        for device, marks in self._marks.items():
            module = module_with_streams(device)
            if module is not None:
                module.synchronize(device)
            while marks:
                self._add_busy(device)
        waited = [Waited(line, sum(each), len(each)) for line, each in self._waited.items()]
        waited.sort(key=lambda each: each.seconds, reverse=True)
        wall = time.perf_counter() - self._began
        return FlightReport(self.n_runs, wall, dict(self._busy), waited)


def _mark(device: torch.device) -> Any:
    """Now: where the device's stream is, if it has one."""
    module = module_with_streams(device)
    if module is None:
        return time.perf_counter()
    return module.current_stream(device).record_event(module.Event(enable_timing=True))


def _is_done(mark: Any) -> bool:
    """Whether a device has got there."""
    return isinstance(mark, float) or bool(mark.query())


def _seconds(start: Any, end: Any) -> float:
    if isinstance(start, float):
        return end - start
    return start.elapsed_time(end) / 1000


_WAITING = {
    *("item", "cpu", "tolist", "numpy", "to", "nonzero", "equal", "allclose", "unique"),
    *("__bool__", "__float__", "__int__", "__index__", "__repr__", "masked_select", "__getitem__"),
}
"""Functions of torch at which Python may wait until a device has got there."""


class NotingWaits(OutsideBlocks, TorchFunctionMode):
    """Within it, the lines are noted at which Python waits for devices.

    Args:
        turns: which are told.
    """

    def __init__(self, turns: WatchedTurns) -> None:
        super().__init__()
        self._turns = turns

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") not in _WAITING:
            return func(*args, **kwargs or {})
        start = time.perf_counter()
        try:
            return func(*args, **kwargs or {})
        finally:
            self._turns.add_wait(line_of_user(sys._getframe(1)), time.perf_counter() - start)

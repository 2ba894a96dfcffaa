"""How long pipelined runs took, and each device's busy share."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from tl_devicefix.dispatch.scheduler import Run, Turns
from tl_devicefix.offload.copying import module_with_streams


@dataclass(frozen=True)
class PipelineReport:
    """How long pipelined runs took. Printing it shows a table.

    Attributes:
        n_runs: how many.
        wall: seconds from the first run's beginning until the last result.
        busy: seconds that each device had some run's blocks, by its own clock where it has one. In
            them is the time for which the device waits for Python in the middle of a run's blocks.
    """

    n_runs: int
    wall: float
    busy: dict[torch.device, float]

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
        rows = [f"{self.n_runs} runs in {self.wall:.2f} s, at best {self.ideal:.2f} s"]
        rows += [
            f"{device!s:>12} busy {seconds:8.2f} s  {seconds / self.wall:4.0%}"
            for device, seconds in self.busy.items()
        ]
        if self._is_on_one:
            rows = [f"{self.n_runs} runs in {self.wall:.2f} s, all on {next(iter(self.busy))}"]
        return "\n".join(rows)


class WatchedTurns(Turns):
    """Turns of devices, and how long each has worked during them."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        super().__init__()
        self._began = time.perf_counter()
        self._started: dict[torch.device, Any] = {}
        self._busy: dict[torch.device, float] = dict.fromkeys(devices, 0.0)
        # Of turns whose work may not be done: when it began and ended.
        self._marks: dict[torch.device, deque[tuple[Any, Any]]] = defaultdict(deque)
        self._n_runs = 0

    def want(self, number: int) -> None:
        """Count a run, whose result is waited for."""
        self._n_runs = number + 1
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
            while marks and (isinstance(marks[0][1], float) or marks[0][1].query()):
                self._add_busy(device)

    def _add_busy(self, device: torch.device) -> None:
        start, end = self._marks[device].popleft()
        seconds = end - start if isinstance(start, float) else start.elapsed_time(end) / 1000
        self._busy[device] = self._busy.get(device, 0.0) + seconds

    def report(self) -> PipelineReport:
        """The report up to now."""
        for device, marks in self._marks.items():
            if (module := module_with_streams(device)) is not None:
                module.synchronize(device)
            while marks:
                self._add_busy(device)
        wall = time.perf_counter() - self._began
        return PipelineReport(self._n_runs, wall, dict(self._busy))


def _mark(device: torch.device) -> Any:
    """Now: an event of the device's stream, or the time if it has none."""
    module = module_with_streams(device)
    if module is None:
        return time.perf_counter()
    return module.current_stream(device).record_event(module.Event(enable_timing=True))

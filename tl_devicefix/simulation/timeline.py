"""What simulated devices that take time did, and when: as a list, a trace file and a picture."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, SupportsIndex, overload

import torch

from tl_devicefix.simulation.drawing import Bar, Chart, drawn

_label: ContextVar[str] = ContextVar("label of what is given to devices", default="")


@contextmanager
def labelled(label: str) -> Iterator[None]:
    """Within it, what this thread gives to simulated devices has a label in ``machine.timeline``.

    Args:
        label: such as ``"run 3"``; it gives the operation its colour in the picture.
    """
    token = _label.set(label)
    try:
        yield
    finally:
        _label.reset(token)


def label_in_force() -> str:
    """The label of what is given to devices now; empty if none is."""
    return _label.get()


@dataclass(frozen=True)
class Busy:
    """An operation, or a copy, that took time on a device."""

    name: str
    """The operation's, as ``aten.mm.default``, or ``copy_``, or ``keep_busy``."""
    device: torch.device
    """Which device was busy; of a copy between two, its source's."""
    stream: int
    """The number of the stream that it was given to."""
    start: float
    """Seconds after the machine was entered."""
    end: float
    """Seconds after the machine was entered."""
    is_copy: bool
    """Whether it went from a device to another, or the host: beside what the device computes."""
    label: str
    """That of the `labelled` within which it was given; empty without."""
    late: float
    """Seconds after ``end`` at which the CPU was done with it, and went on."""


class Timeline(list[Busy]):
    """What took time on the devices of a machine, in the order in which it was done.

    It is a list, and a slice of it is a `Timeline` too; ``clear()`` forgets what there was.
    """

    @overload
    def __getitem__(self, index: SupportsIndex) -> Busy: ...

    @overload
    def __getitem__(self, index: slice) -> Timeline: ...

    def __getitem__(self, index: SupportsIndex | slice) -> Busy | Timeline:
        """One of them, or those of a slice, which are a `Timeline` too."""
        found = super().__getitem__(index)
        return Timeline(found) if isinstance(found, list) else found

    @property
    def start(self) -> float:
        """When the first of them began, in seconds after the machine was entered; 0 of none."""
        return min((each.start for each in self), default=0.0)

    @property
    def end(self) -> float:
        """When the last of them ended, in seconds after the machine was entered; 0 of none."""
        return max((each.end for each in self), default=0.0)

    @property
    def late(self) -> float:
        """Seconds that the CPU was behind the devices' clocks at most.

        It is behind where what it computes, or Python, takes longer than the devices are told to.
        """
        return max((each.late for each in self), default=0.0)

    def busy_seconds(
        self,
        device: int | str | torch.device,
        start: float | None = None,
        end: float | None = None,
    ) -> float:
        """How long a device computed, copies not counted.

        Args:
            device: its index, or as torch names it.
            start: from when, in seconds after the machine was entered; by default, all.
            end: until when.
        """
        index = device if isinstance(device, int) else torch.device(device).index
        start, end = self.start if start is None else start, self.end if end is None else end
        return sum(
            max(0.0, min(each.end, end) - max(each.start, start))
            for each in self
            if each.device.index == index and not each.is_copy
        )

    def busy_share(
        self,
        device: int | str | torch.device,
        start: float | None = None,
        end: float | None = None,
    ) -> float:
        """The share of a time in which a device computed, from 0 to 1; copies are not counted.

        Args:
            device: its index, or as torch names it.
            start: from when, in seconds after the machine was entered; by default, since the
                first device of the machine began.
            end: until when; by default, when the last one ended.
        """
        start, end = self.start if start is None else start, self.end if end is None else end
        return self.busy_seconds(device, start, end) / (end - start) if end > start else 0.0

    def save(self, path: str | Path) -> None:
        """Write it in the Chrome trace format that ``torch.profiler`` writes, for Perfetto.

        A device is a process there, and a stream is a thread.

        Args:
            path: of the file, usually ``trace.json``; one that is there is replaced.
        """
        events: list[dict[str, Any]] = []
        for device in sorted({each.device.index for each in self}):
            events.append(_named("process_name", device, 0, {"name": f"sim:{device}"}))
            events.append(_named("process_sort_index", device, 0, {"sort_index": device}))
        for device, stream in sorted({(each.device.index, each.stream) for each in self}):
            events.append(_named("thread_name", device, stream, {"name": f"stream {stream}"}))
        events.extend(_event(each) for each in self)
        trace = {"schemaVersion": 1, "displayTimeUnit": "ms", "traceEvents": events}
        Path(path).write_text(json.dumps(trace), encoding="utf-8")

    def draw(self, path: str | Path, title: str = "") -> None:
        """Draw it as an SVG: a row for each device, a colour for each label.

        Args:
            path: of the file; one that is there is replaced.
            title: written above.
        """
        draw(path, {title: self})


def draw(path: str | Path, timelines: dict[str, Timeline]) -> None:
    """Draw timelines below each other, on one scale, as an SVG.

    Args:
        path: of the file; one that is there is replaced.
        timelines: by title. A label has the same colour in all of them.
    """
    charts = [
        Chart(
            title,
            timeline.end - timeline.start,
            {
                f"sim:{device}": [
                    Bar(each.start - timeline.start, each.end - timeline.start, each.label,
                        each.is_copy)
                    for each in sorted(timeline, key=lambda each: each.start)
                    if each.device.index == device
                ]
                for device in sorted({each.device.index for each in timeline})
            },
        )
        for title, timeline in timelines.items()
    ]  # fmt: skip
    Path(path).write_text(drawn(charts), encoding="utf-8")


def _named(name: str, device: int, stream: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "ts": 0, "pid": device, "tid": stream, "args": args}


def _event(busy: Busy) -> dict[str, Any]:
    about = {"device": busy.device.index, "stream": busy.stream, "label": busy.label}
    return {
        "ph": "X",
        "cat": "gpu_memcpy" if busy.is_copy else "kernel",
        "name": f"{busy.name} ({busy.label})" if busy.label else busy.name,
        "pid": busy.device.index,
        "tid": busy.stream,
        "ts": busy.start * 1e6,
        "dur": (busy.end - busy.start) * 1e6,
        "args": about,
    }

"""When simulated devices that take time did which operation: as a list, and as a trace file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tl_devicefix.placement.in_use import setting

label_in_force: ContextVar[str] = ContextVar("label of what is given to devices", default="")


@contextmanager
def labelled(label: str) -> Iterator[None]:
    """Label the operations of this thread in ``machine.timeline``, within a ``with`` block.

    Args:
        label: such as ``"run 3"``.

    Yields:
        Nothing.
    """
    with setting(label_in_force, label):
        yield


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


class Timeline(list[Busy]):
    """Operations and copies that took time on a machine's devices, in launch order.

    It is a list, and a slice of it is a `Timeline` too; ``clear()`` forgets what there was.
    """

    def __getitem__(self, index: Any) -> Any:
        """One of them, or those of a slice, which are a `Timeline` too."""
        selected = super().__getitem__(index)
        return Timeline(selected) if isinstance(selected, list) else selected

    @property
    def start(self) -> float:
        """When the first of them began, in seconds after the machine was entered; 0 of none."""
        return min((busy.start for busy in self), default=0.0)

    @property
    def end(self) -> float:
        """When the last of them ended, in seconds after the machine was entered; 0 of none."""
        return max((busy.end for busy in self), default=0.0)

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
        index = device if isinstance(device, int) else torch.device(device).index
        start, end = self.start if start is None else start, self.end if end is None else end
        seconds = sum(
            max(0.0, min(busy.end, end) - max(busy.start, start))
            for busy in self
            if busy.device.index == index and not busy.is_copy
        )
        return seconds / (end - start) if end > start else 0.0

    def save(self, path: str | Path) -> None:
        """Write it in the Chrome trace format that ``torch.profiler`` writes, for Perfetto.

        A device is a process there, and a stream is a thread.

        Args:
            path: of the file, usually ``trace.json``; one that is there is replaced.
        """
        streams = sorted({(busy.device.index, busy.stream) for busy in self})
        events = [
            _event("M", "process_name", device, 0, {"name": f"sim:{device}"})
            for device in sorted({device for device, _ in streams})
        ]
        for device, stream in streams:
            events.append(_event("M", "thread_name", device, stream, {"name": f"stream {stream}"}))
        for busy in self:
            name = f"{busy.name} ({busy.label})" if busy.label else busy.name
            event = _event("X", name, busy.device.index, busy.stream, {"label": busy.label})
            event["cat"] = "gpu_memcpy" if busy.is_copy else "kernel"
            event.update(ts=busy.start * 1e6, dur=(busy.end - busy.start) * 1e6)
            events.append(event)
        trace = {"schemaVersion": 1, "displayTimeUnit": "ms", "traceEvents": events}
        Path(path).write_text(json.dumps(trace), encoding="utf-8")


def _event(phase: str, name: str, device: int, stream: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": phase, "name": name, "ts": 0, "pid": device, "tid": stream, "args": args}

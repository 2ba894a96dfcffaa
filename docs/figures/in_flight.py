"""Draw eight runs across four simulated devices, as a loop and in flight, as an SVG.

python docs/figures/in_flight.py docs/figures/in_flight.svg
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import time
from collections.abc import Iterator
from contextvars import ContextVar
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import torch

import tl_devicefix
from tl_devicefix.demo.demo import load_checkpoint

N_DEVICES = 4

WIDTH, LEFT, RIGHT = 900, 84, 96
ROW, GAP, TOP, BELOW = 30, 6, 44, 28
COLOURS = (
    *("#4338ca", "#b45309", "#047857", "#be185d", "#0369a1", "#7e22ce", "#a16207", "#334155"),
    *("#6366f1", "#f59e0b", "#10b981", "#ec4899", "#38bdf8", "#c084fc", "#eab308", "#94a3b8"),
)

labels: ContextVar[str] = ContextVar("the run that a device is busy with")


class Busy(NamedTuple):
    """A block that a device was busy with."""

    label: str
    device: int
    start: float
    end: float


def timelines(n_runs: int, stage: float) -> dict[str, list[Busy]]:
    """What the devices did in a loop, and what in flight, by title.

    Args:
        n_runs: how many forwards.
        stage: seconds that each takes on each device.
    """
    recorded: list[Busy] = []

    def run(model: Any, number: int) -> torch.Tensor:
        labels.set(str(number))
        return model(torch.full((1, 8), number))[:, -1].cpu()

    with tl_devicefix.simulate(N_DEVICES), torch.no_grad():
        with contextlib.redirect_stdout(io.StringIO()):
            model = load_checkpoint(N_DEVICES)
        for index, block in enumerate(model.blocks):
            device = model.placement.device_of(f"blocks.{index}").index

            def keep_busy(*_: Any, device: int = device) -> None:
                start = time.perf_counter()
                time.sleep(stage * N_DEVICES / len(model.blocks))
                recorded.append(Busy(labels.get(), device, start, time.perf_counter()))

            block.register_forward_pre_hook(keep_busy)
        numbers = range(1, n_runs + 1)
        for number in numbers:
            run(model, number)
        loop = recorded[:]
        recorded.clear()
        list(tl_devicefix.pipeline_map(model, run, numbers))
    return {
        f"{n_runs} runs in a loop: one device at a time": loop,
        "the same in flight": recorded,
    }


def drawn(timelines: dict[str, list[Busy]]) -> str:
    """Timelines below each other, on one scale: a row for each device, a colour for each label."""
    labels = dict.fromkeys(busy.label for timeline in timelines.values() for busy in timeline)
    colours = {label: COLOURS[number % len(COLOURS)] for number, label in enumerate(labels)}
    longest = max(seconds_of(timeline) for timeline in timelines.values())
    scale = (WIDTH - LEFT - RIGHT) / longest
    parts: list[str] = []
    top = 0
    for title, timeline in timelines.items():
        parts.extend(chart(title, timeline, top, scale, colours))
        top += TOP + N_DEVICES * (ROW + GAP) + BELOW
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" '
            'font-family="DejaVu Sans, Helvetica, Arial, sans-serif" font-size="13">',
            f'<rect width="{WIDTH}" height="{top}" rx="8" fill="#ffffff"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


def seconds_of(timeline: list[Busy]) -> float:
    """How long it takes altogether."""
    return max(busy.end for busy in timeline) - min(busy.start for busy in timeline)


def chart(
    title: str, timeline: list[Busy], top: int, scale: float, colours: dict[str, str]
) -> Iterator[str]:
    """One timeline."""
    yield text(16, top + 26, title, "start", ' font-weight="bold" font-size="15"')
    seconds, begin = seconds_of(timeline), min(busy.start for busy in timeline)
    for device in range(N_DEVICES):
        y = top + TOP + device * (ROW + GAP)
        yield text(LEFT - 12, y + ROW / 2 + 4, f"sim:{device}", "end")
        width = seconds * scale
        yield f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{ROW}" fill="#f1f5f9"/>'
        blocks = sorted((b for b in timeline if b.device == device), key=lambda b: b.start)
        for label, run in itertools.groupby(blocks, key=lambda b: b.label):
            of_run = list(run)
            x = LEFT + (of_run[0].start - begin) * scale
            took = of_run[-1].end - of_run[0].start
            yield from bar(label, x, y, took, scale, colours[label])
        share = sum(busy.end - busy.start for busy in blocks) / seconds
        yield text(LEFT + width + 10, y + ROW / 2 + 4, f"{share:.0%} busy")
    bottom = top + TOP + N_DEVICES * (ROW + GAP) + 12
    yield text(LEFT + seconds * scale, bottom, readable(seconds), "end")


def bar(label: str, x: float, y: float, seconds: float, scale: float, colour: str) -> Iterator[str]:
    """What a device does for a run, with its label."""
    width = seconds * scale
    yield (
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW}" fill="{colour}" '
        f'stroke="#ffffff" stroke-width="0.6"><title>{escape(label)}: '
        f"{readable(seconds)}</title></rect>"
    )
    yield text(x + width / 2, y + ROW / 2 + 4, label, "middle", ' fill="#ffffff"')


def readable(seconds: float) -> str:
    """A time with its unit."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def text(x: float, y: float, words: str, anchor: str = "start", more: str = "") -> str:
    """Words at a place."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(words)}</text>'


def main() -> None:
    """Draw it."""
    parser = argparse.ArgumentParser(description="Draw runs in a loop, and in flight.")
    parser.add_argument("picture", type=Path)
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=0.5, help="that a run takes on each")
    chosen = parser.parse_args()
    torch.set_num_threads(1)  # so small a model is slower with more
    picture = drawn(timelines(chosen.runs, chosen.seconds))
    chosen.picture.write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()

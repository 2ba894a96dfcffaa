"""Draw eight runs over four simulated devices, as a loop and in flight, as an SVG.

python docs/figures/in_flight.py docs/figures/in_flight.svg
"""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path
from typing import Any

import torch

import tl_devicefix
from tl_devicefix.demo.demo import load_checkpoint
from tl_devicefix.simulation import Busy, Timeline, labelled

N_DEVICES = 4

WIDTH, LEFT, RIGHT = 900, 84, 96
ROW, GAP, TOP, BELOW = 30, 6, 44, 28
COPIES = 6  # how much of a row's height its copies have
COLOURS = (
    *("#4338ca", "#b45309", "#047857", "#be185d", "#0369a1", "#7e22ce", "#a16207", "#334155"),
    *("#6366f1", "#f59e0b", "#10b981", "#ec4899", "#38bdf8", "#c084fc", "#eab308", "#94a3b8"),
)
WITHOUT_LABEL = "#64748b"
CLOSE = 0.5  # pixels between two bars of one label that are drawn as one


def run(model: Any, number: int) -> torch.Tensor:
    """A forward, in a colour of its own."""
    with labelled(str(number)):
        return model(torch.full((1, 8), number))[:, -1].cpu()


def timelines(n_runs: int, stage: float) -> dict[str, Timeline]:
    """What the devices did in a loop, and what in flight, by title.

    Args:
        n_runs: how many forwards.
        stage: seconds that each takes on each device.
    """
    with tl_devicefix.simulate(N_DEVICES, asynchronous=True) as machine, torch.no_grad():
        with contextlib.redirect_stdout(io.StringIO()):
            model = load_checkpoint(N_DEVICES)
        for index, block in enumerate(model.blocks):
            device = model.placement.device_of(f"blocks.{index}")
            block.register_forward_pre_hook(
                lambda *_, device=device: machine.keep_busy(
                    device, stage * N_DEVICES / len(model.blocks)
                )
            )

        def recorded() -> Timeline:
            for device in range(N_DEVICES):
                torch.get_device_module("sim").synchronize(device)
            found = machine.timeline[:]
            machine.timeline.clear()
            return found

        numbers = range(1, n_runs + 1)
        recorded()
        for number in numbers:
            run(model, number)
        loop = recorded()
        list(tl_devicefix.pipeline_map(model, run, numbers))
        return {
            f"{n_runs} runs in a loop: one device at a time": loop,
            "the same in flight": recorded(),
        }


def drawn(timelines: dict[str, Timeline]) -> str:
    """Timelines below each other, on one scale: a row for each device, a colour for each label."""
    labels = [busy.label for timeline in timelines.values() for busy in timeline]
    labels = [label for label in dict.fromkeys(labels) if label]
    colours = {label: COLOURS[number % len(COLOURS)] for number, label in enumerate(labels)}
    longest = max((timeline.end - timeline.start for timeline in timelines.values()), default=0.0)
    scale = (WIDTH - LEFT - RIGHT) / (longest or 1.0)
    parts: list[str] = []
    top = 0
    for title, timeline in timelines.items():
        devices = sorted({busy.device.index for busy in timeline})
        parts.extend(chart(title, timeline, devices, top, scale, colours))
        top += TOP + len(devices) * (ROW + GAP) + BELOW
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


def chart(
    title: str,
    timeline: Timeline,
    devices: list[int],
    top: int,
    scale: float,
    colours: dict[str, str],
) -> Iterator[str]:
    """One timeline."""
    yield text(16, top + 26, title, "start", ' font-weight="bold" font-size="15"')
    seconds = timeline.end - timeline.start
    for number, device in enumerate(devices):
        y = top + TOP + number * (ROW + GAP)
        yield text(LEFT - 12, y + ROW / 2 + 4, f"sim:{device}", "end")
        width = seconds * scale
        yield f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{ROW}" fill="#f1f5f9"/>'
        bars = sorted((b for b in timeline if b.device.index == device), key=lambda b: b.start)
        for first, last in together(bars, CLOSE / scale):
            x = LEFT + (first.start - timeline.start) * scale
            colour = colours.get(first.label, WITHOUT_LABEL)
            yield from bar(first, x, y, last.end - first.start, scale, colour)
        share = timeline.busy_share(device)
        yield text(LEFT + width + 10, y + ROW / 2 + 4, f"{share:.0%} busy")
    bottom = top + TOP + len(devices) * (ROW + GAP) + 12
    yield text(LEFT + seconds * scale, bottom, readable(seconds), "end")


def together(bars: list[Busy], close: float) -> list[tuple[Busy, Busy]]:
    """First and last of the bars of one label that follow each other closely."""
    pairs: list[tuple[Busy, Busy]] = []
    before: dict[bool, int] = {}
    for busy in bars:
        index = before.get(busy.is_copy)
        if index is not None:
            first, last = pairs[index]
            if last.label == busy.label and busy.start - last.end <= close:
                pairs[index] = first, max(last, busy, key=lambda b: b.end)
                continue
        before[busy.is_copy] = len(pairs)
        pairs.append((busy, busy))
    return pairs


def bar(busy: Busy, x: float, y: float, seconds: float, scale: float, colour: str) -> Iterable[str]:
    """A bar, with its label where there is room for it."""
    width = max(seconds * scale, 0.3)
    height = COPIES if busy.is_copy else ROW - COPIES
    y += ROW - COPIES if busy.is_copy else 0
    yield (
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" fill="{colour}" '
        f'stroke="#ffffff" stroke-width="0.6"><title>{escape(busy.label)}: '
        f"{readable(seconds)}</title></rect>"
    )
    if not busy.is_copy and 8 * len(busy.label) < width:
        yield text(x + width / 2, y + height / 2 + 4, busy.label, "middle", ' fill="#ffffff"')


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

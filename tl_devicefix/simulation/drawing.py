"""Charts of what was busy when, as an SVG: a row for each device, a colour for each label."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

_WIDTH, _LEFT, _RIGHT = 900, 84, 96
_ROW, _GAP, _TOP, _BELOW = 30, 6, 44, 28
_COPIES = 6
"""How much of a row's height its copies have."""
_COLOURS = (
    *("#4338ca", "#b45309", "#047857", "#be185d", "#0369a1", "#7e22ce", "#a16207", "#334155"),
    *("#6366f1", "#f59e0b", "#10b981", "#ec4899", "#38bdf8", "#c084fc", "#eab308", "#94a3b8"),
)
_WITHOUT_LABEL = "#64748b"
_CLOSE = 0.5
"""Pixels between two bars of one label that are drawn as one."""


class Bar(NamedTuple):
    """Something that a row was busy with, in seconds since the chart's start."""

    start: float
    end: float
    label: str
    is_copy: bool


@dataclass(frozen=True)
class Chart:
    """Rows of bars, each row in order.

    Attributes:
        title: written above.
        seconds: how long it is.
        rows: by name.
    """

    title: str
    seconds: float
    rows: dict[str, list[Bar]]


def drawn(charts: list[Chart]) -> str:
    """The picture of charts below each other, on one scale."""
    labels = [bar.label for chart in charts for row in chart.rows.values() for bar in row]
    colours = {
        label: _COLOURS[number % len(_COLOURS)]
        for number, label in enumerate(label for label in dict.fromkeys(labels) if label)
    }
    longest = max((chart.seconds for chart in charts), default=0.0)
    scale = (_WIDTH - _LEFT - _RIGHT) / (longest or 1.0)
    parts: list[str] = []
    top = 0
    for chart in charts:
        parts.extend(_chart(chart, top, scale, colours))
        top += _height(chart)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top}" '
            'font-family="DejaVu Sans, Helvetica, Arial, sans-serif" font-size="13">',
            f'<rect width="{_WIDTH}" height="{top}" rx="8" fill="#ffffff"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


def _height(chart: Chart) -> int:
    return _TOP + len(chart.rows) * (_ROW + _GAP) + _BELOW


def _chart(chart: Chart, top: int, scale: float, colours: dict[str, str]) -> Iterable[str]:
    yield _text(16, top + 26, chart.title, "start", ' font-weight="bold" font-size="15"')
    for number, (name, bars) in enumerate(chart.rows.items()):
        y = top + _TOP + number * (_ROW + _GAP)
        yield _text(_LEFT - 12, y + _ROW / 2 + 4, name, "end")
        width = chart.seconds * scale
        yield f'<rect x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_ROW}" fill="#f1f5f9"/>'
        for bar in _together(bars, _CLOSE / scale):
            yield from _bar(bar, y, scale, colours.get(bar.label, _WITHOUT_LABEL))
        busy = sum(bar.end - bar.start for bar in bars if not bar.is_copy)
        share = busy / chart.seconds if chart.seconds else 0.0
        yield _text(_LEFT + width + 10, y + _ROW / 2 + 4, f"{share:.0%} busy")
    bottom = top + _TOP + len(chart.rows) * (_ROW + _GAP) + 12
    yield _text(_LEFT + chart.seconds * scale, bottom, _readable(chart.seconds), "end")


def _together(bars: list[Bar], close: float) -> list[Bar]:
    """Bars, those of one label that follow each other closely as one."""
    found: list[Bar] = []
    last: dict[bool, int] = {}
    for bar in bars:
        before = last.get(bar.is_copy)
        if (
            before is not None
            and found[before].label == bar.label
            and bar.start - found[before].end <= close
        ):
            found[before] = found[before]._replace(end=max(bar.end, found[before].end))
            continue
        last[bar.is_copy] = len(found)
        found.append(bar)
    return found


def _bar(bar: Bar, y: float, scale: float, colour: str) -> Iterable[str]:
    x, width = _LEFT + bar.start * scale, max((bar.end - bar.start) * scale, 0.3)
    height = _COPIES if bar.is_copy else _ROW - _COPIES
    y += _ROW - _COPIES if bar.is_copy else 0
    yield (
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" fill="{colour}" '
        f'stroke="#ffffff" stroke-width="0.6"><title>{escape(bar.label)}: '
        f"{_readable(bar.end - bar.start)}</title></rect>"
    )
    if not bar.is_copy and 8 * len(bar.label) < width:
        yield _text(x + width / 2, y + height / 2 + 4, bar.label, "middle", ' fill="#ffffff"')


def _readable(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _text(x: float, y: float, text: str, anchor: str = "start", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(text)}</text>'

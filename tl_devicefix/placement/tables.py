"""Sizes and tables, as people read them."""

from __future__ import annotations

from collections.abc import Sequence


def gib(size: float) -> str:
    """A size in bytes: "1.25 GiB", "640.0 KiB", "-7.30 GiB"."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20)):
        if abs(size) >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size / 2**10:.1f} KiB"


def format_table(rows: Sequence[Sequence[str]], align: str) -> str:
    """Lay rows out as lines, each column as wide as its widest cell.

    Args:
        rows: the cells of each row, the heads first.
        align: "<" or ">" for each column; the last one is also that of all further columns.

    Returns:
        A line for each row.

    >>> print(format_table([("device", "held"), ("cuda:0", "9.00 GiB")], "<>"))
    device      held
    cuda:0  9.00 GiB
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = align.ljust(len(widths), align[-1])
    lines = (
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths))
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)

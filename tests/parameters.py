"""Quick and full sets of a test's parameters: `pytest --full` runs the full ones."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def in_turn(*axes: Iterable[Any]) -> list[Any]:
    """Return the rows of a product: by default the values of each axis in turn, else all.

        @pytest.mark.parametrize(("kind", "dtype"), in_turn(["gpt2", "llama", "bloom"], DTYPES))

    runs each kind once, in one of two dtypes; with `--full`, each in both. A tuple, or a
    `pytest.param`, stands for several parameters.
    """
    values = [[_param(value) for value in axis] for axis in axes]
    quick = {
        # Each round shifts an axis by its place, so that axes of one length get out of step.
        tuple((i + place * (i // len(axis))) % len(axis) for place, axis in enumerate(values))
        for i in range(max(map(len, values)))
    }
    rows = []
    for indices in product(*(range(len(axis)) for axis in values)):
        row = [axis[index] for axis, index in zip(values, indices)]
        marks = [mark for param in row for mark in param.marks]
        if indices not in quick:
            marks.append(pytest.mark.full)
        rows.append(pytest.param(*(value for param in row for value in param.values), marks=marks))
    return rows


def _param(value: Any) -> Any:
    if isinstance(value, type(pytest.param())):
        return value
    return pytest.param(*value) if isinstance(value, tuple) else pytest.param(value)

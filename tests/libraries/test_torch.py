"""docs/compatibility.md: each row of its table, over four devices, for each class of model."""

from __future__ import annotations

import contextlib
import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from comparison import assert_agrees
from either_class import BRIDGE, HOOKED
from torch_rows import ROWS

import tl_devicefix

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
WORKS, MIXING, NEITHER, REFUSED = "yes", "within `mix_devices`", "fails on one device too", "no: "
STATES = (WORKS, MIXING, NEITHER, REFUSED)


def table() -> dict[str, dict[str, str]]:
    """What the page says of each row, for each class."""
    _, _, section = PAGE.read_text().partition("\n## What works with torch")
    section, _, _ = section.partition("\n## ")
    cells = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|$", section, re.MULTILINE)
    rows = [cell for cell in cells if cell[0] in ROWS or cell[1].startswith(STATES)]
    return {name: {HOOKED: hooked, BRIDGE: bridge} for name, hooked, bridge in rows}


TABLE = table()
OUT_OF_TIME = pytest.mark.full(reason="it compiles for half a minute; parts of models are compiled")


def test_every_row_of_the_page_is_run_and_all_that_is_run_is_on_it() -> None:
    assert list(TABLE) == list(ROWS)


@pytest.fixture
def both(cls: str, on_one: Any, machine: Any, request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """A Llama over four devices, and the same on one CPU, for a row to change as it likes."""
    load = request.getfixturevalue("boot" if cls == BRIDGE else "from_pretrained")
    models = load("llama", n_devices=4), copy.deepcopy(on_one("llama"))
    return tuple(model.requires_grad_() for model in models)


@pytest.mark.cover
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=OUT_OF_TIME if "compile(model)" in n else ()) for n in ROWS]
)
def test_a_row_is_as_the_page_says(
    name: str, cls: str, both: tuple[Any, Any], tokens: torch.Tensor
) -> None:
    (spread, alone), says, call = both, TABLE[name][cls], ROWS[name]
    if says.startswith(NEITHER):
        with pytest.raises((AttributeError, RuntimeError)):
            call(alone, tokens)
        return
    if says.startswith(REFUSED):
        with pytest.raises((RuntimeError, TypeError)) as caught:
            call(spread, tokens)
        assert str(caught.value).split("\n")[0].startswith(says.removeprefix(REFUSED).split("*")[1])
        return
    expected = call(alone, tokens)
    if says == MIXING:
        with pytest.raises(RuntimeError, match="same device"):
            call(spread, tokens)
    else:
        assert says == WORKS
    with tl_devicefix.mix_devices() if says == MIXING else contextlib.nullcontext():
        assert_agrees(call(spread, tokens), expected, tolerance=1e-4)

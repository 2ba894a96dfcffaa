"""docs/compatibility.md: each row of its table, over four devices, for each class of model."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from comparison import assert_agrees
from either_class import BRIDGE, CLASSES, HOOKED
from on_demand import OnDemand
from torch_rows import OF_NEW_MODELS, ROWS

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


@pytest.fixture(params=CLASSES, scope="module")
def cls(request: pytest.FixtureRequest) -> str:
    """The class of the models."""
    return request.param


@pytest.fixture(scope="module")
def machine() -> Iterator[Any]:
    """Four devices, on which models are shared."""
    with tl_devicefix.simulate(4) as machine:
        yield machine


@pytest.fixture(scope="module")
def of_either_class(
    cls: str, machine: Any, checkpoints: Any, request: pytest.FixtureRequest
) -> Callable[[str], Any]:
    """`of_either_class("spread")`: a Llama over four devices; or "alone", unpatched on one CPU."""

    def make(where: str) -> Any:
        if cls == HOOKED and where == "spread":
            return request.getfixturevalue("load")("llama")
        if cls == HOOKED:
            return copy.deepcopy(request.getfixturevalue("references")("llama"))
        from transformer_lens.model_bridge import TransformerBridge

        boot = TransformerBridge.boot_transformers
        if where == "spread":
            return boot(str(checkpoints("llama")), n_devices=4)
        with tl_devicefix.disabled():
            return boot(str(checkpoints("llama")), device="cpu")

    return make


@pytest.fixture(scope="module")
def shared(of_either_class: Any) -> Callable[[str], Any]:
    """As `of_either_class`, loaded once."""
    return OnDemand(of_either_class)


@pytest.fixture
def both(name: str, of_either_class: Any, shared: Any) -> Iterator[tuple[Any, Any]]:
    """The spread model, and that on one CPU; afterwards they are as they were."""
    get = of_either_class if name in OF_NEW_MODELS else shared
    models = get("spread"), get("alone")
    parameters = [parameter for model in models for parameter in model.parameters()]
    before = [
        (parameter.data, parameter.detach().clone(), parameter.requires_grad)
        for parameter in parameters
    ]
    for parameter in parameters:
        parameter.requires_grad_()
    yield models
    if name in OF_NEW_MODELS:
        return
    for parameter, (data, values, required) in zip(parameters, before):
        parameter.data = data.copy_(values)
        parameter.grad = None
        parameter.requires_grad_(required)


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

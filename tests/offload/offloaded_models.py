"""Models of which some blocks live in host memory, on the simulated devices of a module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from offloads import OFFLOADED
from transformer_lens import HookedTransformer

from tl_devicefix.simulation.machine import Machine


@pytest.fixture(scope="module")
def load(machine: Machine, from_pretrained: Any) -> Callable[..., HookedTransformer]:
    """`load("gpt2", "all of one device")`: a model for one test to change as it likes."""

    def load(name: str, offload: str, **options: Any) -> HookedTransformer:
        return from_pretrained(name, device_map=OFFLOADED[offload], **options)

    return load


@pytest.fixture(scope="module")
def models(load: Any) -> Callable[..., HookedTransformer]:
    """As `load`, but loaded once for the tests of a module: not to be changed."""
    loaded: dict[Any, HookedTransformer] = {}

    def get(kind: str, offload: str) -> HookedTransformer:
        if (kind, offload) not in loaded:
            loaded[kind, offload] = load(kind, offload)
        return loaded[kind, offload]

    return get


@pytest.fixture
def offload() -> str:
    """Which of `OFFLOADED` the model is; parametrise it for others."""
    return "some of one device"


@pytest.fixture
def model(models: Any, kind: str, offload: str) -> HookedTransformer:
    """The model under test, not to be changed."""
    model = models(kind, offload)
    model.reset_hooks(including_permanent=True)
    model.zero_grad()
    return model

"""Models of which some blocks live in host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from offloads import OFFLOADED
from spread_of_either_class import *  # noqa: F403


@pytest.fixture
def kind() -> str:
    """Which architecture the model has; parametrise it for others."""
    return "llama"


@pytest.fixture(scope="module")
def load(machine: Any, from_pretrained: Any) -> Callable[..., Any]:
    """`load("gpt2", "all of one device")`: a model for one test to change as it likes."""

    def load(name: str, offload: str, **options: Any) -> Any:
        return from_pretrained(name, device_map=OFFLOADED[offload], **options)

    return load


@pytest.fixture
def offload() -> str:
    """Which of `OFFLOADED` the model is; parametrise it for others."""
    return "some of one device"


@pytest.fixture
def spread(offload: str) -> str:
    """What `model` is loaded with."""
    return offload

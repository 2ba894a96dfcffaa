"""A simulated machine, for one test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from racing import asynchronous

import tl_devicefix
from tl_devicefix.simulation.machine import Machine


@pytest.fixture
def n_devices() -> int:
    """How many devices `machine` has; parametrise `n_devices` for others."""
    return 4


@pytest.fixture(scope="session")
def simulated(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """`with simulated(4) as machine`: as `tl_devicefix.simulate`.

    With `--asynchronous`, its devices run behind the host.
    """
    behind = request.config.getoption("--asynchronous")
    return asynchronous if behind else tl_devicefix.simulate


@pytest.fixture
def machine(n_devices: int, simulated: Any) -> Iterator[Machine]:
    """A simulated machine, on which models load by default."""
    with simulated(n_devices) as machine:
        yield machine

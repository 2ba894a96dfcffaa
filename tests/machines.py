"""A simulated machine, for one test."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

import tl_devicefix
from tl_devicefix.monkeypatch.versions import has_hooked_transformer
from tl_devicefix.simulation.machine import Machine

if has_hooked_transformer():
    from unpatched_tl import transformer_lens_alone


@pytest.fixture
def n_devices() -> int:
    """How many devices `machine` has; parametrise `n_devices` for others."""
    return 4


def how_devices_run(config: pytest.Config) -> dict[str, Any]:
    """What `simulate` is given: with `--asynchronous`, devices that run behind the host."""
    return {"asynchronous": config.getoption("--asynchronous")}


@pytest.fixture
def machine(n_devices: int, request: pytest.FixtureRequest) -> Iterator[Machine]:
    """A simulated machine, on which models load by default."""
    with tl_devicefix.simulate(n_devices, **how_devices_run(request.config)) as machine:
        if not request.config.getoption("--unpatched"):
            unpatched: Any = contextlib.nullcontext()
        elif has_hooked_transformer():
            unpatched = transformer_lens_alone(machine)
        else:
            unpatched = tl_devicefix.disabled()
        with unpatched:
            yield machine

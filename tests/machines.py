"""A simulated machine, for one test."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from racing import asynchronous

import tl_devicefix
from tl_devicefix.monkeypatch.versions import has_hooked_transformer
from tl_devicefix.simulation.machine import Machine

if has_hooked_transformer():
    from unpatched_tl import transformer_lens_alone


@pytest.fixture
def n_devices() -> int:
    """How many devices `machine` has; parametrise `n_devices` for others."""
    return 4


@pytest.fixture(scope="session")
def simulated(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """`with simulated(4) as machine`: as `tl_devicefix.simulate`.

    With `--unpatched` it is without the patches, and with `--asynchronous` behind the host.
    """

    @contextlib.contextmanager
    def simulated(*args: Any, **options: Any) -> Iterator[Machine]:
        behind = request.config.getoption("--asynchronous")
        enter: Any = asynchronous if behind else tl_devicefix.simulate
        with enter(*args, **options) as machine:
            unpatched: Any = contextlib.nullcontext()
            if request.config.getoption("--unpatched"):
                alone = has_hooked_transformer()
                unpatched = transformer_lens_alone(machine) if alone else tl_devicefix.disabled()
            with unpatched:
                yield machine

    return simulated


@pytest.fixture
def machine(n_devices: int, simulated: Any) -> Iterator[Machine]:
    """A simulated machine, on which models load by default."""
    with simulated(n_devices) as machine:
        yield machine

"""`in_flight` on devices that run behind the host, as real ones do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from runs_of_users import (
    Run,
    a_number_that_is_waited_for,
    assert_bit_equal,
    gradients_of_activations,
    some_of_the_cache,
    with_a_mask,
)

import tl_devicefix
from tl_devicefix import in_flight
from tl_devicefix.simulation.machine import Machine

SOME = (a_number_that_is_waited_for, gradients_of_activations, some_of_the_cache, with_a_mask)


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    """Asynchronous devices, open for a whole module."""
    with tl_devicefix.simulate(4, asynchronous=True) as machine:
        yield machine


@pytest.mark.cover
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("run", SOME, ids=lambda run: run.__name__)
def test_on_devices_that_run_behind_the_host(
    machine: Any, folded: Any, tokens: torch.Tensor, dtype: torch.dtype, run: Run
) -> None:
    with torch.no_grad():
        model = folded("gpt2", 2).to(dtype)
        batches = [tokens.roll(shift, 1) for shift in range(3)]
        expected = [run(model, batch) for batch in batches]
        assert_bit_equal(list(in_flight(model, run, batches)), expected)


def test_the_callers_current_device_is_a_runs(machine: Machine, folded: Any) -> None:
    model, module = folded("gpt2", 2), torch.get_device_module("sim")
    module.set_device(2)
    try:
        found = list(in_flight(model, lambda view, item: module.current_device(), range(3)))
    finally:
        module.set_device(0)
    assert found == [2, 2, 2]

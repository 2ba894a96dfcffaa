"""`in_flight` on devices that run behind the host, as real ones do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from runs_of_users import (
    a_number_that_is_waited_for,
    assert_bit_equal,
    logits,
    some_of_the_cache,
    with_a_mask,
)

import tl_devicefix
from tl_devicefix import in_flight
from tl_devicefix.simulation.machine import Machine


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    """Asynchronous devices, open for a whole module."""
    with tl_devicefix.simulate(4, asynchronous=True) as machine:
        yield machine


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_devices_that_run_behind_the_host(
    machine: Any, folded: Any, tokens: torch.Tensor, dtype: torch.dtype
) -> None:
    with torch.no_grad():
        model = folded("gpt2", 2).to(dtype)
        batches = [tokens.roll(shift, 1) for shift in range(5)]
        for run in (with_a_mask, some_of_the_cache, a_number_that_is_waited_for):
            expected = [run(model, batch) for batch in batches]
            assert_bit_equal(list(in_flight(model, run, batches)), expected)


def test_devices_work_at_the_same_time(machine: Any, folded: Any, tokens: torch.Tensor) -> None:
    def longest_together(n_runs: int, at_once: int) -> float:
        machine.timeline.clear()
        list(in_flight(model, logits, [tokens] * n_runs, at_once))
        first, second = (
            [each for each in machine.timeline if each.device.index == index] for index in (0, 1)
        )
        together = [
            min(one.end, other.end) - max(one.start, other.start)
            for one in first
            for other in second
        ]
        return max(together)

    with torch.no_grad():
        model = folded("llama", 2)
        for block in (model.blocks[0], model.blocks[-1]):
            block.hook_resid_post.add_perma_hook(
                lambda activation, hook: machine.keep_busy(activation.device, 0.2)
            )
        assert longest_together(3, at_once=1) <= 0
        assert longest_together(3, at_once=2) > 0

"""Runs in flight over ranks: stages of different ranks compute at the same time."""

from __future__ import annotations

import threading
from typing import Any

import torch
from hf_models import N_LAYERS
from test_traffic import far_blocks
from test_traffic import names as commands_of

import tl_devicefix
from tl_devicefix import pipeline_map
from tl_devicefix.multihost.far_devices import FarDevices

FOREVER = 30
"""Seconds, after which nobody waits any more."""
BOTH = threading.Barrier(2)


def meet() -> None:
    BOTH.wait(FOREVER)


class Meeting:
    """A rank that unpickles it waits for rank 0, as if it computed for long."""

    def __reduce__(self) -> Any:
        return meet, ()


def test_a_rank_is_at_one_run_while_rank_0_is_at_the_next(
    model: Any, tokens: torch.Tensor, far: FarDevices
) -> None:
    has_begun = threading.Event()

    def begin(value: torch.Tensor, hook: Any) -> None:
        has_begun.set()

    def meet_there(value: torch.Tensor, hook: Any) -> None:
        far.tell(1, "free", (Meeting(),))

    def meet_here(value: torch.Tensor, hook: Any) -> None:
        meet()

    far_point = f"blocks.{N_LAYERS - 1}.hook_resid_pre"
    hooks = {
        0: [("blocks.0.hook_resid_pre", begin), (far_point, meet_there)],
        1: [("blocks.0.hook_resid_post", meet_here)],
    }

    def run(view: Any, number: int) -> torch.Tensor:
        if number:
            has_begun.wait(FOREVER)  # or it might wait where run 0 has still to come
        with torch.no_grad():
            return view.run_with_hooks(tokens.roll(number, 1), fwd_hooks=hooks.get(number, []))

    result = list(pipeline_map(model, run, range(3)))

    with torch.no_grad():
        for number, logits in enumerate(result):
            assert torch.equal(logits.cpu(), model(tokens.roll(number, 1)).cpu())


def test_blocks_run_whole_in_flight_too_and_are_held_once_for_all_runs(
    model: Any, tokens: torch.Tensor, told: list[Any]
) -> None:
    def run(view: Any, number: int) -> torch.Tensor:
        with torch.no_grad():
            return view(tokens.roll(number, 1))

    run(model, 0)
    with tl_devicefix.mix_devices():
        list(pipeline_map(model, run, range(3)))

    assert commands_of(told).count("call") == 4 * len(far_blocks(model))
    assert commands_of(told).count("build") <= len(far_blocks(model))  # or it was before

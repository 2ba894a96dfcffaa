"""Runs in flight over ranks: stages of different ranks compute at the same time."""

from __future__ import annotations

import os
import threading
from pathlib import Path
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


class UntilSomeoneWrites:
    """What a rank that unpickles it waits for, as if it computed for long."""

    def __init__(self, pipe: Path) -> None:
        self._pipe = pipe

    def __reduce__(self) -> Any:
        return os.open, (str(self._pipe), os.O_RDONLY)


def test_a_rank_is_at_one_run_while_rank_0_is_at_the_next(
    model: Any, tokens: torch.Tensor, far: FarDevices, tmp_path: Path
) -> None:
    """Each waits there for the other."""
    pipe, n_met, gave_up = tmp_path / "pipe", [], threading.Event()
    os.mkfifo(pipe)
    has_begun = threading.Event()

    def begin(value: torch.Tensor, hook: Any) -> None:
        has_begun.set()

    def wait_there(value: torch.Tensor, hook: Any) -> None:
        far.tell(1, "free", (UntilSomeoneWrites(pipe),))

    def wait_here(value: torch.Tensor, hook: Any) -> None:
        os.close(os.open(pipe, os.O_WRONLY))  # waits until the rank is there
        n_met.append(1)

    def run(view: Any, number: int) -> torch.Tensor:
        hooks = {
            0: [
                ("blocks.0.hook_resid_pre", begin),
                (f"blocks.{N_LAYERS - 1}.hook_resid_pre", wait_there),
            ],
            1: [("blocks.0.hook_resid_post", wait_here)],
        }
        if number:
            has_begun.wait(FOREVER)  # or it might wait where run 0 has still to come
        with torch.no_grad():
            return view.run_with_hooks(tokens.roll(number, 1), fwd_hooks=hooks.get(number, []))

    # To whoever opens it in vain.
    giving_up = threading.Timer(FOREVER, lambda: (gave_up.set(), os.open(pipe, os.O_RDWR)))
    giving_up.start()
    result = list(pipeline_map(model, run, range(3)))
    giving_up.cancel()

    assert not gave_up.is_set()
    assert n_met == [1]
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

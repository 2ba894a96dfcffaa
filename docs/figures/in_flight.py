"""Draw eight runs over four simulated devices, as a loop and in flight, as an SVG.

python docs/figures/pipeline_map.py docs/figures/in_flight.svg
"""

from __future__ import annotations

import argparse
import contextlib
import io
from pathlib import Path
from typing import Any

import torch

import tl_devicefix
from tl_devicefix.demo.demo import load_checkpoint
from tl_devicefix.simulation import Timeline, draw, labelled

N_DEVICES = 4


def run(model: Any, number: int) -> torch.Tensor:
    """A forward, in a colour of its own."""
    with labelled(str(number)):
        return model(torch.full((1, 8), number))[:, -1].cpu()


def timelines(n_runs: int, stage: float) -> dict[str, Timeline]:
    """What the devices did in a loop, and what in flight, by title.

    Args:
        n_runs: how many forwards.
        stage: seconds that each takes on each device.
    """
    with tl_devicefix.simulate(N_DEVICES, asynchronous=True) as machine, torch.no_grad():
        with contextlib.redirect_stdout(io.StringIO()):
            model = load_checkpoint(N_DEVICES)
        for index, block in enumerate(model.blocks):
            device = model.placement.device_of(f"blocks.{index}")
            block.register_forward_pre_hook(
                lambda *_, device=device: machine.keep_busy(
                    device, stage * N_DEVICES / len(model.blocks)
                )
            )

        def recorded() -> Timeline:
            for device in range(N_DEVICES):
                torch.get_device_module("sim").synchronize(device)
            found = machine.timeline[:]
            machine.timeline.clear()
            return found

        numbers = range(1, n_runs + 1)
        recorded()
        for number in numbers:
            run(model, number)
        loop = recorded()
        list(tl_devicefix.pipeline_map(model, run, numbers))
        return {
            f"{n_runs} runs in a loop: one device at a time": loop,
            "the same in flight": recorded(),
        }


def main() -> None:
    """Draw it."""
    parser = argparse.ArgumentParser(description="Draw runs in a loop, and in flight.")
    parser.add_argument("picture", type=Path)
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=0.5, help="that a run takes on each")
    chosen = parser.parse_args()
    torch.set_num_threads(1)  # so small a model is slower with more
    draw(chosen.picture, timelines(chosen.runs, chosen.seconds))


if __name__ == "__main__":
    main()

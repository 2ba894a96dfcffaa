"""What `mix_devices` costs, and the check for parts on other devices: ratios of times.

    python benchmarks/mix_devices.py [--rounds 30] [--json FILE]

Calls with `mix_devices` on and off alternate in one process, so that noise hits both. For torch
calls, the figure is the ratio of the smallest times; for forwards, the median of the ratios.
Operations that mix devices are timed on simulated devices, and compared with `.to(...)` by hand.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

import tl_devicefix
from tl_devicefix.demo.demo import CHECKPOINT
from tl_devicefix.dispatch.user_modules import move_in_parts


def seconds(call: Callable[[], Any], times: int) -> float:
    """Return the mean seconds of a call."""
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times


def in_turns(
    one: Callable[[], Any],
    other: Callable[[], Any],
    rounds: int,
    times: int,
    within: Callable[[], AbstractContextManager[Any]] = tl_devicefix.mix_devices,
) -> tuple[list[float], list[float]]:
    """Return the seconds of a call within `mix_devices`, and of another without, in turns."""
    on, off = [], []
    for _ in range(rounds):
        with within():
            on.append(seconds(one, times))
        off.append(seconds(other, times))
    return on, off


def load(**options: Any) -> Any:
    """Load the model that ships with the package."""
    from transformer_lens import HookedTransformer

    with contextlib.redirect_stdout(io.StringIO()):
        return HookedTransformer.from_pretrained(str(CHECKPOINT), **options)


def median_ratio(pair: tuple[list[float], list[float]]) -> float:
    """Return the median of the rounds' ratios."""
    return statistics.median(one / other for one, other in zip(*pair))


def on_the_cpu(rounds: int) -> dict[str, float]:
    """Measure a small add and a forward on the CPU."""
    x, y = torch.ones(8), torch.ones(8)
    add = in_turns(lambda: x + y, lambda: x + y, rounds, 2000)
    model, tokens = load(device="cpu"), torch.randint(0, 30, (4, 32))
    forward = in_turns(lambda: model(tokens), lambda: model(tokens), rounds, 5)
    return {
        "an add, on / off": min(add[0]) / min(add[1]),
        "a forward, on / off": median_ratio(forward),
    }


def on_four_devices(rounds: int) -> dict[str, float]:
    """Measure a forward, an add that mixes, and the check for misplaced parts, on four devices."""
    model, one = load(n_devices=4), load(device="cpu")
    tokens = torch.randint(0, 30, (4, 32))
    forward = in_turns(lambda: model(tokens), lambda: model(tokens), rounds, 2)
    x, y = torch.ones(8, device="sim:0"), torch.ones(8, device="sim:3")
    mixed = in_turns(lambda: x + y, lambda: x + y.to("sim:0"), rounds, 200)
    looks = in_turns(
        lambda: move_in_parts(model, model.placement),
        lambda: one(tokens),
        rounds,
        20,
        within=contextlib.nullcontext,
    )
    return {
        "a forward on four simulated devices, on / off": median_ratio(forward),
        "an add that mixes, on / with .to(...)": min(mixed[0]) / min(mixed[1]),
        "checking for parts on other devices / a forward": min(looks[0]) / min(looks[1]),
    }


def measure(rounds: int) -> dict[str, float]:
    """Return all figures."""
    with torch.no_grad():
        idle = on_the_cpu(rounds)
        with tl_devicefix.simulate(4):
            keep = load(n_devices=4)
            busy = on_the_cpu(rounds)
            del keep
            over_four = on_four_devices(rounds)
    return {
        **{f"one device in use: {name}": value for name, value in idle.items()},
        **{f"four devices in use: {name}": value for name, value in busy.items()},
        **over_four,
    }


def main() -> None:
    """Measure and print a table; write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    torch.set_num_threads(1)

    results = measure(arguments.rounds)
    for name, value in results.items():
        print(f"{name:<50}{value:8.4f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()

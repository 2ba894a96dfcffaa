"""What a patching sweep over all layers costs, over the same unpatched: blocks run, and time.

    python benchmarks/sweeps.py [--layers 16] [--width 256] [--rounds 5] [--json FILE]

`get_act_patch_resid_pre` of a random model on one device, with and without the package in turns in
one process, so that noise on the machine hits both. On one thread, so that CPU seconds are what it
takes where nothing else runs; the wall is that of this machine. Of each the smallest of `--rounds`.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["TQDM_DISABLE"] = "1"  # before tqdm is imported

import torch
from transformer_lens import HookedTransformer, HookedTransformerConfig, patching

import tl_devicefix


def make_model(layers: int, width: int) -> HookedTransformer:
    """A random GPT-2-shaped model on the CPU."""
    torch.manual_seed(0)
    return HookedTransformer(
        HookedTransformerConfig(
            n_layers=layers,
            d_model=width,
            d_head=width // 8,
            d_vocab=1000,
            n_ctx=64,
            act_fn="gelu",
            device="cpu",
        )
    )


def sweep(model: HookedTransformer, tokens: torch.Tensor, clean: Any) -> torch.Tensor:
    """Patch each position of each layer."""
    return patching.get_act_patch_resid_pre(
        model, tokens, clean, lambda logits: logits[0, -1, 5] - logits[0, -1, 7]
    )


def blocks_run(model: HookedTransformer, call: Callable[[], Any]) -> int:
    """How many blocks run in a call."""
    cls = type(model.blocks[0])
    own, count = cls.forward, [0]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        return own(self, *args, **kwargs)

    with mock.patch.object(cls, "forward", forward):
        call()
    return count[0]


def measure(layers: int, width: int, rounds: int) -> dict[str, float]:
    """The ratios on one device.

    Raises:
        RuntimeError: if the results are not equal, bit for bit.
    """
    model = make_model(layers, width)
    tokens = torch.arange(4)[None].repeat(4, 1)
    _, clean = model.run_with_cache(tokens.flip(1))

    def call() -> torch.Tensor:
        return sweep(model, tokens, clean)

    here = blocks_run(model, call)
    with tl_devicefix.disabled():
        there = blocks_run(model, call)
    times = []
    for _ in range(rounds):
        result, *here_s = timed(call)
        with tl_devicefix.disabled():
            expected, *there_s = timed(call)
        if not torch.equal(result, expected):
            raise RuntimeError("the results are not equal, bit for bit: report it")
        times.append((*here_s, *there_s))
    cpu, wall, cpu_there, wall_there = map(min, zip(*times))
    return {
        "blocks_ratio": here / there,
        "cpu_ratio": cpu / cpu_there,
        "wall_ratio": wall / wall_there,
    }


def timed(call: Callable[[], Any]) -> tuple[Any, float, float]:
    """What a call returns, and its CPU seconds and seconds."""
    cpu, wall = time.process_time(), time.perf_counter()
    result = call()
    return result, time.process_time() - cpu, time.perf_counter() - wall


def main() -> None:
    """Measure and print a table; write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    torch.set_num_threads(1)

    with torch.no_grad():
        results = measure(arguments.layers, arguments.width, arguments.rounds)
    for name, value in results.items():
        print(f"{name:<28}{value:8.3f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()

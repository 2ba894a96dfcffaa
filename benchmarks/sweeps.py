"""What a patching sweep over all layers costs, over the same unpatched: blocks run, and time.

    python benchmarks/sweeps.py [--layers 16] [--width 256] [--rounds 3] [--json FILE]

`get_act_patch_resid_pre` of a random model on one device, with and without the package in turns in
one process, so that noise on the machine hits both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
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
    """Both ratios on one device.

    Raises:
        RuntimeError: if the results are not equal, bit for bit.
    """
    model = make_model(layers, width)
    tokens = torch.arange(4)[None].repeat(4, 1)
    _, clean = model.run_with_cache(tokens.flip(1))

    def call() -> torch.Tensor:
        return sweep(model, tokens, clean)

    here = blocks_run(model, call)
    with tl_devicefix.unpatched():
        there = blocks_run(model, call)
    ratios = []
    for _ in range(rounds):
        start = time.perf_counter()
        result = call()
        between = time.perf_counter()
        with tl_devicefix.unpatched():
            begin = time.perf_counter()
            expected = call()
            end = time.perf_counter()
        if not torch.equal(result, expected):
            raise RuntimeError("the results are not equal, bit for bit: report it")
        ratios.append((between - start) / (end - begin))
    return {"blocks_ratio": here / there, "time_ratio": statistics.median(ratios)}


def main() -> None:
    """Measure and print a table; write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    torch.set_num_threads(1)

    with torch.no_grad():
        results = measure(arguments.layers, arguments.width, arguments.rounds)
    # TO BE FILLED: the same on 4 busy simulated devices.
    for name, value in results.items():
        print(f"{name:<28}{value:8.3f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()

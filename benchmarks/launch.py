"""The time that Python takes in a forward and for a token, with fused blocks and without.

    python benchmarks/launch.py [--rounds 60] [--only WORD ...] [--json FILE]

A Llama of ten tiny blocks, whose kernels take next to no time, is loaded in each way in this
process, and the ways take turns. Each figure is the CPU seconds of one thread, divided by those of
transformers with SDPA, or of TransformerLens, in the same round: the median of all rounds.
"TransformerLens" is this process with the patches off; "here" is loaded by this package and runs
TransformerLens's own blocks. A "forward" has 8 tokens; a "token" comes after 16 in a KV cache.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import operator
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from forward import continuing, forward_of, load, make_checkpoint
from packaging.version import Version

FLOOR = "transformers sdpa"
ALONE = "TransformerLens"
N_FORWARD, N_CONTEXT = 8, 16
BRIDGE = Version(version("transformer_lens")) >= Version("4.dev0")

Run = Callable[[torch.Tensor], Any]


@dataclass(frozen=True)
class Way:
    """One way to run the model.

    Attributes:
        model: the model, loaded for this way.
        forward: a function from tokens to logits.
        begin: starts a new KV cache, and returns a function from new tokens to logits; None if the
            way does not generate.
        alone: True if the patches are off.
        over: the name of TransformerLens's way that does the same.
    """

    model: Any
    forward: Run
    begin: Callable[[], Run] | None
    alone: bool = False
    over: str = ALONE


def ways() -> dict[str, Way]:
    """Return all ways by name. A Bridge runs the tasks in compatibility mode."""
    made = {way: of(way) for way in (FLOOR, "transformers eager")}
    modes = ("", ", compatibility mode") if BRIDGE else ("",)
    for mode in modes:
        alone = ALONE + mode
        made[alone] = of("TransformerLens", alone=True, mode=mode)
        made[f"here{mode}"] = of("here", over=alone, mode=mode)
        made[f"here fused{mode}"] = of("here fused", over=alone, mode=mode)
    for task, make in TASKS.items():
        over = f"{ALONE}{modes[-1]}, {task}"
        made[over] = make(of("TransformerLens", alone=True, mode=modes[-1]))
        for way in ("here", "here fused"):
            made[f"{way}{modes[-1]}, {task}"] = make(of(way, over=over, mode=modes[-1]))
    made.update(nnsight_way())
    return made


def of(kind: str, alone: bool = False, over: str = ALONE, mode: str = "") -> Way:
    """Return a way of `forward.py`, patched or not."""
    import tl_devicefix

    with tl_devicefix.disabled() if alone else contextlib.nullcontext():
        model = load(kind, torch.float32, "cpu", BRIDGE)
        if mode:
            model.enable_compatibility_mode()
    forward = forward_of(kind, model, BRIDGE)
    return Way(model, forward, lambda: continuing(kind, model, BRIDGE, 1), alone, over)


def hooked(way: Way, wanted: str) -> Way:
    """Return the way with hooks on the hook points whose names end in `wanted`."""
    way.model.add_hook(lambda name: name.endswith(wanted), lambda activation, hook: None)
    return way


def caching(way: Way, wanted: str) -> Way:
    """Return a way that caches the activations whose names end in `wanted`."""

    def forward(tokens: torch.Tensor) -> Any:
        return way.model.run_with_cache(tokens, names_filter=lambda name: name.endswith(wanted))

    return replace(way, forward=forward, begin=None)


def learning(way: Way) -> Way:
    """Return a way that computes the loss and its gradients."""

    def forward(tokens: torch.Tensor) -> None:
        with torch.inference_mode(False), torch.enable_grad():
            way.model(tokens, return_type="loss").backward()
            way.model.zero_grad()

    return replace(way, forward=forward, begin=None)


TASKS: dict[str, Callable[[Way], Way]] = {
    "a hook on one block": lambda way: hooked(way, "blocks.4.hook_resid_post"),
    "a hook on every residual stream": lambda way: hooked(way, "hook_resid_post"),
    "run_with_cache of residual streams": lambda way: caching(way, "hook_resid_post"),
    "run_with_cache of everything": lambda way: caching(way, ""),
    "loss and backward": learning,
}


def nnsight_way() -> dict[str, Way]:
    """Return nnsight's way to read a block's output, with SDPA; {} if it is not installed."""
    try:
        from nnsight import NNsight
    except ImportError:
        print("left out: nnsight is not installed", file=sys.__stdout__)
        return {}
    plain = load(FLOOR, torch.float32, "cpu", bridge=False)
    model = NNsight(plain)

    def forward(tokens: torch.Tensor) -> Any:
        with model.trace(tokens, use_cache=False):
            saved = model.model.layers[4].output.save()
        return saved

    return {f"nnsight {version('nnsight')}, one block's output": Way(plain, forward, None)}


def measure(all_ways: dict[str, Way], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return, for each way, the CPU seconds of a forward and of a token in each round."""
    import tl_devicefix

    with torch.inference_mode(False):
        prompt = torch.randint(3, 100, (1, N_CONTEXT))
    found: dict[str, dict[str, list[float]]] = {name: {} for name in all_ways}
    for _ in range(rounds):
        for name, way in all_ways.items():
            with tl_devicefix.disabled() if way.alone else contextlib.nullcontext():
                seconds = {"forward": timed(way.forward, prompt[:, :N_FORWARD])}
                if way.begin is not None:
                    run = way.begin()
                    run(prompt)
                    seconds["token"] = timed(run, prompt[:, :1])
            for what, took in seconds.items():
                found[name].setdefault(what, []).append(took)
    return found


def timed(run: Run, tokens: torch.Tensor, calls: int = 2) -> float:
    """Return the CPU seconds for one call, after one to warm up."""
    run(tokens)
    start = time.process_time()
    for _ in range(calls):
        run(tokens)
    return (time.process_time() - start) / calls


def ratio(some: dict[str, list[float]], others: dict[str, list[float]]) -> dict[str, float]:
    """Return the median of the rounds' ratios to another way."""
    return {
        what: statistics.median(map(operator.truediv, some[what], others[what]))
        for what in some.keys() & others.keys()
    }


def ratios(found: dict[str, Any], all_ways: dict[str, Way]) -> dict[str, Any]:
    """Return what each took, compared with transformers and with TransformerLens alone."""
    return {
        name: {
            "ms": {what: 1000 * statistics.median(took) for what, took in seconds.items()},
            "over transformers": ratio(seconds, found[FLOOR]),
            "over TransformerLens alone": ratio(seconds, found.get(all_ways[name].over, {})),
        }
        for name, seconds in found.items()
    }


def main() -> None:
    """Measure and print a table; write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--only", nargs="+", metavar="WORD", help="only ways whose names have one")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as cache, torch.inference_mode():
        # transformers reads these when it is imported.
        os.environ.update(HF_HUB_CACHE=cache, HF_HUB_OFFLINE="1", TL_DEVICEFIX_DISABLE="")
        with contextlib.ExitStack() as quiet:  # each load prints, and shows bars
            quiet.enter_context(torch.inference_mode(False))
            quiet.enter_context(contextlib.redirect_stderr(io.StringIO()))
            quiet.enter_context(contextlib.redirect_stdout(io.StringIO()))
            make_checkpoint(Path(cache), "launch", 128, "cpu")
            all_ways = ways()
        words = arguments.only or [""]
        kept = {n: w for n, w in all_ways.items() if n == FLOOR or any(x in n for x in words)}
        found = ratios(measure(kept, arguments.rounds), kept)
    names = ("transformer_lens", "transformers", "torch")
    print(", ".join(f"{name} {version(name)}" for name in names))
    print(f"{'':<62} {'over transformers':^15} {'over alone':^15}")
    print(f"{'':<62}" + f" {'forward':>8} {'token':>8}" * 2)
    for name, each in found.items():
        columns = (each["over transformers"], each["over TransformerLens alone"])
        cells = [ratios_to.get(what) for ratios_to in columns for what in ("forward", "token")]
        print(f"{name:<62}" + "".join(f" {'' if c is None else f'{c:.2f}':>8}" for c in cells))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()

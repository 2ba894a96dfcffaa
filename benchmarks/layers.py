"""How the cost of each operation grows with the blocks, compared with TransformerLens alone.

    python benchmarks/layers.py [--layers 10 40 80] [--rounds 7] [--only WORD ...] [--bridge]
                                [--json FILE]

The models are Llamas of `d_model` 32, whose kernels take next to no time, so this measures Python.
TransformerLens alone (with the patches off), this package ("here") and fused blocks take turns at
each operation. Times are CPU seconds of all threads, with one thread of torch. A ratio is the
median of the rounds' ratios, and milliseconds are the least of all rounds. TransformerLens has no
sweep and no `pipeline_map`: they are compared with its loop of `run_with_hooks`.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import io
import json
import operator
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

# transformers reads these when it is imported.
os.environ.update(HF_HUB_CACHE=tempfile.mkdtemp(), HF_HUB_OFFLINE="1", TL_DEVICEFIX_DISABLE="")

import torch
from forward import load, make_checkpoint
from launch import ALONE, BRIDGE

import tl_devicefix

CACHE = Path(os.environ["HF_HUB_CACHE"])
KINDS = (ALONE, "here", "here fused")
N_RUNS = 16

atexit.register(shutil.rmtree, CACHE, ignore_errors=True)

Found = dict[str, dict[int, dict[str, Any]]]
"""Operation -> number of blocks -> the times and ratios."""


@dataclass
class Way:
    """A model that was loaded in one of the ways compared, and the other inputs of operations."""

    kind: str
    bridge: bool
    tokens: torch.Tensor

    def __post_init__(self) -> None:
        self.model = self.load()
        _, self.cache = self.model.run_with_cache(self.tokens)
        self.runs = one_hook_each(len(self.model.blocks))

    def load(self) -> Any:
        """Load the model."""
        return load_quietly(self.kind, self.bridge, device="cpu")


def load_quietly(kind: str, bridge: bool, device: str | None = None, **options: Any) -> Any:
    """Load in one of `KINDS`, without the lines and bars that each load prints."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return load(kind, torch.float32, device, bridge, **options)


def make_llama(n_layers: int, d_model: int) -> None:
    """Make the checkpoint that later loads read."""
    shape = {"hidden_size": d_model, "intermediate_size": 11 * d_model // 4}
    make_checkpoint(CACHE, "launch", 128, "cpu", num_hidden_layers=n_layers, **shape)


def one_hook_each(n_layers: int) -> list[list[tuple[str, Any]]]:
    """Return runs with a hook on one residual stream each, from the first block to the last."""
    layers = [round(index * (n_layers - 1) / (N_RUNS - 1)) for index in range(N_RUNS)]
    return [[(f"blocks.{layer}.hook_resid_pre", halve)] for layer in layers]


def halve(activation: torch.Tensor, hook: Any) -> torch.Tensor:
    """Halve an activation (a hook)."""
    return activation / 2


def read(activation: torch.Tensor, hook: Any) -> None:
    """Change nothing (a hook)."""


def loop(model: Any, tokens: torch.Tensor, runs: list[Any]) -> list[torch.Tensor]:
    """Call `run_with_hooks` for each run."""
    return [model.run_with_hooks(tokens, fwd_hooks=run) for run in runs]


def in_flight(model: Any, tokens: torch.Tensor, runs: list[Any]) -> list[torch.Tensor]:
    """Do the same by `pipeline_map`."""

    def run(view: Any, hooks: Any) -> torch.Tensor:
        return view.run_with_hooks(tokens, fwd_hooks=hooks)

    return list(tl_devicefix.pipeline_map(model, run, runs))


def sweep(model: Any, tokens: torch.Tensor, runs: list[Any], **options: Any) -> list[torch.Tensor]:
    """Do the same by a sweep."""
    return list(tl_devicefix.sweep(model, tokens, runs, **options))


def backward(way: Way) -> None:
    """Compute the loss and its gradients."""
    with torch.enable_grad():
        way.model(way.tokens, return_type="loss").backward()
        way.model.zero_grad()


def generate(way: Way) -> Any:
    """Generate eight tokens."""
    options = {"stop_at_eos": False, "do_sample": False, "verbose": False}
    return way.model.generate(way.tokens, max_new_tokens=8, **options)


def cached(way: Way, ending: str) -> Any:
    """Call `run_with_cache` for the activations whose names end in `ending`."""
    return way.model.run_with_cache(way.tokens, names_filter=lambda name: name.endswith(ending))


def hooked(way: Way, names: Any) -> Any:
    """Call `run_with_hooks` with one hook function."""
    return way.model.run_with_hooks(way.tokens, fwd_hooks=[(names, read)])


OPERATIONS: dict[str, Callable[[Way], Any]] = {
    "load": Way.load,
    "forward": lambda way: way.model(way.tokens),
    "a hook on one block": lambda way: hooked(way, way.runs[N_RUNS // 2][0][0]),
    "a hook on every hook point": lambda way: hooked(way, lambda name: True),
    "run_with_cache of residual streams": lambda way: cached(way, "hook_resid_post"),
    "run_with_cache of everything": lambda way: cached(way, ""),
    "generate, 8 tokens": generate,
    "accumulated_resid": lambda way: way.cache.accumulated_resid(incl_mid=True),
    "stacked weights (W_Q and W_out)": lambda way: (way.model.W_Q, way.model.W_out),
    "loss and backward": backward,
    "sweep of 16 runs": lambda way: sweep(way.model, way.tokens, way.runs),
    "sweep of 16 runs, batch_size=16": lambda way: sweep(
        way.model, way.tokens, way.runs, batch_size=N_RUNS
    ),
    "pipeline_map of 16 runs": lambda way: in_flight(way.model, way.tokens, way.runs),
    "check": lambda way: tl_devicefix.check(way.model),
}


def call(operation: str, way: Way) -> Callable[[], Any] | None:
    """Return the call of an operation; TransformerLens alone loops, and has no `check`."""
    if way.kind == ALONE and operation.endswith(("16 runs", "batch_size=16")):
        return partial(loop, way.model, way.tokens, way.runs)
    if way.kind == ALONE and operation == "check":
        return None
    return partial(OPERATIONS[operation], way)


def in_turns(
    calls: dict[str, Callable[[], Any]], rounds: int, freeze: bool = True
) -> dict[str, list[float]]:
    """Return the CPU seconds of each call in each round; TransformerLens's calls are unpatched.

    With `freeze`, garbage collections skip the models that are not in use.
    """
    found: dict[str, list[float]] = {name: [] for name in calls}
    gc.collect()
    if freeze:
        gc.freeze()
    for _ in range(rounds):
        for name, run in calls.items():
            with alone(name):
                found[name].append(least(run))
    return found


def least(run: Callable[[], Any]) -> float:
    """Return the CPU seconds of a call; it is repeated for 50 ms, and the least counts.

    The first is slow: switching the patches on or off empties Python's attribute caches.
    """
    took: list[float] = []
    while sum(took) < 0.05:
        start = time.process_time()
        run()
        took.append(time.process_time() - start)
    return min(took)


def alone(name: str) -> contextlib.AbstractContextManager[Any]:
    """Return a context without the patches, if a name is that of TransformerLens alone."""
    return tl_devicefix.disabled() if name.startswith(ALONE) else contextlib.nullcontext()


def ratio(some: list[float], others: list[float]) -> float:
    """Return the median of the rounds' ratios."""
    return statistics.median(map(operator.truediv, some, others))


def measure(arguments: argparse.Namespace) -> Found:
    """Return what each operation took in each way."""
    words = arguments.only or [""]
    found: Found = {name: {} for name in OPERATIONS if any(word in name for word in words)}
    for n_layers in arguments.layers:
        make_llama(n_layers, 32)
        ways = []
        for kind in KINDS:
            with alone(kind):
                ways.append(Way(kind, arguments.bridge, torch.arange(3, 11)[None]))
        for operation in found:
            calls = {way.kind: run for way in ways if (run := call(operation, way))}
            took = in_turns(calls, arguments.rounds)
            found[operation][n_layers] = {
                "ms": {kind: 1000 * min(each) for kind, each in took.items()},
                "over TransformerLens alone": {
                    kind: ratio(took[kind], took[ALONE]) for kind in KINDS[1:] if ALONE in took
                },
            }
    return found


def show(found: Found, layers: list[int]) -> None:
    """Print the table."""
    groups = ("here / alone", "fused / alone", "ms here", "ms a block")
    column = max(8, 16 // len(layers))
    print(f"{'':<36}" + "".join(f"{group:>{column * len(layers)}}" for group in groups))
    print(f"{'blocks':<36}" + "".join(f"{n:>{column}}" for n in layers) * len(groups))
    for operation, each in found.items():
        rows = [each[n] for n in layers]
        cells = [row["over TransformerLens alone"].get(kind) for kind in KINDS[1:] for row in rows]
        cells += [row["ms"]["here"] for row in rows]
        cells += [row["ms"]["here"] / n for n, row in zip(layers, rows)]
        print(
            f"{operation:<36}"
            + "".join(f"{'' if c is None else f'{c:.2f}':>{column}}" for c in cells)
        )


def begin(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line, and print what is measured."""
    parser.add_argument("--bridge", action="store_true", default=BRIDGE)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    names = ("transformer_lens", "transformers", "torch")
    cls = "TransformerBridge" if arguments.bridge else "HookedTransformer"
    print(f"{cls}, " + ", ".join(f"{name} {version(name)}" for name in names), flush=True)
    return arguments


def main() -> None:
    """Measure and print a table; write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", nargs="+", type=int, default=[10, 40, 80])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="+", metavar="WORD", help="only if the name has one")
    arguments = begin(parser)
    with torch.no_grad():
        found = measure(arguments)
    show(found, arguments.layers)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()

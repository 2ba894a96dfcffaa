"""What `pipeline_map`, and sweeps by it, gain on several devices, and cost on one.

    python benchmarks/pipeline_map.py [PART ...] [--n 2 4 8] [--m 1 4 16 64] [--seconds 0.3] ...

Parts: `busy`, `sweep`, `clock`, `overhead`, `views`; all by default.

`busy`: m runs of the shipped model over n simulated devices, each of which is kept busy for
`--seconds` by its share of the blocks, which sleep. m runs pass n such stages in m + n - 1 stages
at best. It is 300 stages by default: 5 minutes with --seconds 1. Python's time comes on top: a
stage has to be longer than it needs for a run, which is printed.

`sweep`: `transformer_lens.patching.get_act_patch_resid_pre` on four such devices, and the same
by TransformerLens's own loop. The last device bounds it, as every run
comes there: with 8 layers and 16 positions it works for 120 of the loop's 512 stages, and the first
run comes there after three. What a sweep saves on one device: benchmarks/sweeps.py.

`clock`: a Llama-shaped model over two simulated devices that compute what they compute, a core
each; a loop and `pipeline_map` alternate. Beside it is what two threads gain at that time with
nothing but matrix products: less than 2 if other jobs use the cores.

`overhead`: `pipeline_map` with one run at a time on one device over a loop, in turns, for the
shipped model and one like that of `clock`. `views`: what is allocated when views are made.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import itertools
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["TQDM_DISABLE"] = "1"  # before tqdm is imported

import torch
from transformer_lens import patching
from transformers import LlamaConfig, LlamaForCausalLM

import tl_devicefix
from tl_devicefix import pipeline_map
from tl_devicefix.adapters import adapter_of
from tl_devicefix.demo import CHECKPOINT
from tl_devicefix.demo.demo import load_checkpoint
from tl_devicefix.pipelining import patching as patches

Rows = list[dict[str, Any]]


def seconds(call: Callable[[], Any]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def shipped(n_devices: int) -> Any:
    """The model that ships with the package, of either class."""
    with contextlib.redirect_stdout(io.StringIO()):
        return load_checkpoint(n_devices)


# On simulated devices that take time


def busy(arguments: argparse.Namespace) -> Rows:
    """Share of the ideal, for each number of devices and of runs."""
    rows = []
    for n in arguments.n:
        with tl_devicefix.simulate(n):
            model = shipped(n)
            python = min(seconds(functools.partial(forward, model, 0)) for _ in range(3))
            keep_busy(model, n, arguments.seconds)
            rows += [
                {**of_runs(model, n, m, arguments.seconds), "python": python} for m in arguments.m
            ]
            del model
    return rows


def keep_busy(model: Any, n: int, stage: float) -> None:
    """Have each of n devices be busy for so many seconds with its share of the blocks."""
    for block in model.blocks:
        block.register_forward_pre_hook(lambda *_: time.sleep(stage * n / len(model.blocks)))


def forward(model: Any, number: int) -> Any:
    """One run."""
    return model(torch.full((1, 8), 1 + number % 8))


def of_runs(model: Any, n: int, m: int, stage: float) -> dict[str, Any]:
    """What m runs take, beside the ideal."""
    wall = seconds(lambda: list(pipeline_map(model, forward, range(m))))
    return {"n": n, "m": m, "wall": wall, "of_ideal": (m + n - 1) * stage / wall}


def show_busy(rows: Rows) -> None:
    """Print the table."""
    print(f"{'n':>3} {'m':>3} {'wall s':>8} {'of ideal':>9} {'Python s a run':>15}")
    for row in rows:
        print(
            f"{row['n']:>3} {row['m']:>3} {row['wall']:>8.2f} {row['of_ideal']:>9.3f} "
            f"{row['python']:>15.3f}"
        )


def sweep(arguments: argparse.Namespace) -> dict[str, Any]:
    """A patching sweep by TransformerLens's loop over the same in flight.

    Raises:
        RuntimeError: if the results are not equal, bit for bit.
    """
    tokens = torch.arange(1, 1 + arguments.positions)[None]
    with tl_devicefix.simulate(4):
        model = shipped(4)
        _, clean = model.run_with_cache(tokens.flip(1))
        keep_busy(model, 4, arguments.seconds)

        def call() -> tuple[torch.Tensor, float]:
            start = time.perf_counter()
            found = patching.get_act_patch_resid_pre(
                model, tokens, clean, lambda logits: logits[0, -1, 5] - logits[0, -1, 7]
            )
            return found, time.perf_counter() - start

        found, wall = call()
        with mock.patch.object(patches, "is_model", return_value=False):
            expected, of_loop = call()
        del model, clean
        if not torch.equal(found, expected):
            raise RuntimeError("the results are not equal, bit for bit: report it")
    return {
        "loop_over_sweep": of_loop / wall,
        "runs": found.numel(),
        "wall_s": wall,
        "loop_s": of_loop,
    }


# By the real clock


def llama(directory: str, d_model: int, n_layers: int) -> None:
    """Make a checkpoint with random weights."""
    config = LlamaConfig(
        hidden_size=d_model, intermediate_size=4 * d_model, num_hidden_layers=n_layers,
        num_attention_heads=d_model // 64, vocab_size=1000, max_position_embeddings=2048,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(directory)
    for file in CHECKPOINT.glob("*token*"):
        shutil.copy(file, directory)


def load(directory: str, n_devices: int) -> Any:
    """A checkpoint over n devices, by the class that TransformerLens has."""
    try:
        from transformer_lens import HookedTransformer
    except ImportError:  # TransformerLens 4
        from transformer_lens.model_bridge import TransformerBridge

        return TransformerBridge.boot_transformers(directory, n_devices=n_devices)
    return HookedTransformer.from_pretrained(directory, n_devices=n_devices)


def clock(arguments: argparse.Namespace) -> dict[str, Any]:
    """A loop's time over that of `pipeline_map`, over two devices with a core each."""
    ratios, loops, products = [], [], []
    with tempfile.TemporaryDirectory() as directory, tl_devicefix.simulate(2):
        llama(directory, arguments.d_model, arguments.layers)
        with contextlib.redirect_stdout(io.StringIO()):
            model = load(directory, 2)
        items = [torch.randint(1000, (1, arguments.tokens)) for _ in range(arguments.runs)]

        def run(model: Any, tokens: torch.Tensor) -> torch.Tensor:
            return model(tokens)[:, -1].cpu()

        run(model, items[0])  # warm up
        for _ in range(arguments.rounds):
            products.append(in_two_threads(arguments.tokens, arguments.d_model))
            loops.append(seconds(lambda: [run(model, item) for item in items]))
            ratios.append(loops[-1] / seconds(lambda: list(pipeline_map(model, run, items))))
    m = arguments.runs
    return {
        "loop_over_in_flight": statistics.median(ratios),
        "of_each_round": ratios,
        "at_best": 2 * m / (m + 1),
        "of_matrix_products": products,
        "loop_s": statistics.median(loops),
    }


def in_two_threads(n_tokens: int, d_model: int) -> float:
    """Matrix products one after the other over the same in two threads."""
    activation, weight = torch.randn(n_tokens, d_model), torch.randn(d_model, 4 * d_model)

    def multiply(_: int) -> None:
        for _ in range(100):
            activation @ weight

    with ThreadPoolExecutor(2) as pool:
        return seconds(lambda: list(map(multiply, range(2)))) / seconds(
            lambda: list(pool.map(multiply, range(2)))
        )


# On one device


def overhead(arguments: argparse.Namespace) -> dict[str, Any]:
    """`pipeline_map` with one run at a time over a loop, on one CPU device, for two models."""
    with tempfile.TemporaryDirectory() as directory:
        llama(directory, arguments.d_model, arguments.layers)
        with contextlib.redirect_stdout(io.StringIO()):
            larger = load(directory, 1)
    of_shipped = over_loop(shipped(1), (4, 32), 40, arguments.overhead_rounds)
    of_larger = over_loop(larger, (1, 64), 6, arguments.overhead_rounds)
    return {
        **{f"shipped, {name}": value for name, value in of_shipped.items()},
        **{f"of {arguments.d_model}, {name}": value for name, value in of_larger.items()},
    }


def over_loop(model: Any, shape: tuple[int, int], n_runs: int, rounds: int) -> dict[str, float]:
    """CPU seconds in turns: the ratio, of the smallest that each run took, and a forward's.

    In CPU seconds on one thread, as other jobs on the machine take none of them; but they slow it
    down now and then, so that of each run the quickest of all rounds counts. The view is made in
    the first one.
    """
    items = [torch.randint(0, model.cfg.d_vocab, shape) for _ in range(n_runs)]

    def run(model: Any, tokens: torch.Tensor) -> torch.Tensor:
        return model(tokens)

    def of_each_run(results: Iterator[Any]) -> list[float]:
        marks = [time.process_time(), *(time.process_time() for _ in results)]
        return [end - start for start, end in itertools.pairwise(marks)]

    times: dict[str, list[list[float]]] = {"loop": [], "pipeline_map": []}
    for _ in range(rounds + 1):  # one to warm up
        times["loop"].append(of_each_run(run(model, item) for item in items))
        times["pipeline_map"].append(of_each_run(pipeline_map(model, run, items, max_in_flight=1)))
    loop, flight = (sum(map(min, zip(*each[1:]))) for each in times.values())
    return {"pipeline_map over loop": flight / loop, "a forward, s": loop / n_runs}


def views(arguments: argparse.Namespace) -> dict[str, Any]:
    """Bytes that are allocated when views are made, on all devices together."""
    with tl_devicefix.simulate(4) as machine:
        model = shipped(4)
        before = sum(map(machine.memory_allocated, machine.devices))
        made = [adapter_of(model).view_of(model) for _ in range(5)]
        after = sum(map(machine.memory_allocated, machine.devices))
        return {"views": len(made), "model_bytes": before, "copied_bytes": after - before}


PARTS: dict[str, Callable[[argparse.Namespace], Any]] = {
    "busy": busy,
    "sweep": sweep,
    "clock": clock,
    "overhead": overhead,
    "views": views,
}


def main() -> None:
    """Measure and print tables; write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--positions", type=int, default=16, help="that sweep patches, each layer")
    parser.add_argument("--n", nargs="+", type=int, default=[2, 4, 8], help="numbers of devices")
    parser.add_argument("--m", nargs="+", type=int, default=[1, 4, 16, 64], help="numbers of runs")
    parser.add_argument("--seconds", type=float, default=0.3, help="that a stage takes")
    parser.add_argument("--d-model", type=int, default=1024, help="of clock's and overhead's")
    parser.add_argument("--layers", type=int, default=4, help="of clock's and overhead's")
    parser.add_argument("--tokens", type=int, default=256, help="of each of clock's runs")
    parser.add_argument("--runs", type=int, default=20, help="of clock")
    parser.add_argument("--rounds", type=int, default=3, help="of clock")
    parser.add_argument("--overhead-rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"no part is called {unknown.pop()}: choose from {', '.join(PARTS)}")

    torch.set_num_threads(1)  # a core for each device; and the shipped model is slower with more
    results: dict[str, Any] = {"cores": os.cpu_count(), "load": os.getloadavg()[0]}
    print(f"{results['cores']} cores, load {results['load']:.1f}; a stage is {arguments.seconds} s")
    with torch.no_grad():
        for part in arguments.parts or PARTS:
            results[part] = PARTS[part](arguments)
            print(f"\n{part}")
            if isinstance(results[part], list):
                show_busy(results[part])
                continue
            for name, value in results[part].items():
                print(f"  {name:<30}{value if isinstance(value, (int, list)) else f'{value:.3f}'}")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()

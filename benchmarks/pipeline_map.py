"""What `pipeline_map` gains on several devices, and costs on one.

    python benchmarks/pipeline_map.py [PART ...] [--n 2 4 8] [--m 1 4 16 64] [--seconds 0.3] ...

Parts: `busy`, `clock`, `overhead`, `views`; all by default.

`busy`: m runs of the shipped model on n simulated devices. The blocks sleep, so that each device is
busy for `--seconds` with its share of them: a stage. At best, m runs take m + n - 1 stages. By
default that is 300 stages in all: 5 minutes with --seconds 1. Python's time for a run, which is
printed, comes on top, so a stage has to be longer.

`clock`: a Llama-shaped model on two simulated devices, which compute on a core each; a loop and
`pipeline_map` alternate. `of_matrix_products` is the speed-up of two threads that only multiply
matrices, in the same rounds: less than 2 if other jobs use the cores.

`overhead`: `pipeline_map` with one run at a time on one device, and a loop, in turns, for the
shipped model and one like that of `clock`.

`views`: the bytes that are allocated when views are made.
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

os.environ["TQDM_DISABLE"] = "1"  # before tqdm is imported

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import tl_devicefix
from tl_devicefix import pipeline_map
from tl_devicefix.adapters import adapter_of
from tl_devicefix.demo import CHECKPOINT
from tl_devicefix.demo.demo import load_checkpoint

Rows = list[dict[str, Any]]


def seconds(call: Callable[[], Any]) -> float:
    """Return how long a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def shipped(n_devices: int) -> Any:
    """Load the model that ships with the package, by either class."""
    with contextlib.redirect_stdout(io.StringIO()):
        return load_checkpoint(n_devices)


# Simulated devices that sleep


def busy(arguments: argparse.Namespace) -> Rows:
    """Return the ideal time / the measured time, for each number of devices and of runs."""
    rows = []
    for n in arguments.n:
        with tl_devicefix.simulate(n):
            model = shipped(n)
            python = min(seconds(functools.partial(forward, model, 0)) for _ in range(3))
            keep_busy(model, n, arguments.seconds)
            rows += [
                {**time_runs(model, n, m, arguments.seconds), "python": python} for m in arguments.m
            ]
            del model
    return rows


def keep_busy(model: Any, n: int, stage: float) -> None:
    """Make the blocks of each of n devices sleep for `stage` seconds in all."""
    for block in model.blocks:
        block.register_forward_pre_hook(lambda *_: time.sleep(stage * n / len(model.blocks)))


def forward(model: Any, number: int) -> Any:
    """Do one run."""
    return model(torch.full((1, 8), 1 + number % 8))


def time_runs(model: Any, n: int, m: int, stage: float) -> dict[str, Any]:
    """Return what m runs take, and the ideal time / that time."""
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


# Devices that compute on a core each


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
    """Load a checkpoint across n devices, by the class that TransformerLens has."""
    try:
        from transformer_lens import HookedTransformer
    except ImportError:  # TransformerLens 4
        from transformer_lens.model_bridge import TransformerBridge

        return TransformerBridge.boot_transformers(directory, n_devices=n_devices)
    return HookedTransformer.from_pretrained(directory, n_devices=n_devices)


def clock(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return a loop's time / `pipeline_map`'s time, on two devices with a core each."""
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
    """Return the time of matrix products in one thread / the time in two threads."""
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
    """Compare `pipeline_map`, one run at a time, with a loop, for two models on one device."""
    with tempfile.TemporaryDirectory() as directory:
        llama(directory, arguments.d_model, arguments.layers)
        with contextlib.redirect_stdout(io.StringIO()):
            larger = load(directory, 1)
    small_ratios = compare_with_loop(shipped(1), (4, 32), 40, arguments.overhead_rounds)
    large_ratios = compare_with_loop(larger, (1, 64), 6, arguments.overhead_rounds)
    return {
        **{f"shipped, {name}": value for name, value in small_ratios.items()},
        **{f"of {arguments.d_model}, {name}": value for name, value in large_ratios.items()},
    }


def compare_with_loop(
    model: Any, shape: tuple[int, int], n_runs: int, rounds: int
) -> dict[str, float]:
    """Return the ratio to a loop, and the seconds of a forward.

    Times are CPU seconds of this process, the least of all rounds for each run: other jobs slow
    down some of them. The first round makes the view, and is left out.
    """
    items = [torch.randint(0, model.cfg.d_vocab, shape) for _ in range(n_runs)]

    def run(model: Any, tokens: torch.Tensor) -> torch.Tensor:
        return model(tokens)

    def seconds_of_runs(results: Iterator[Any]) -> list[float]:
        marks = [time.process_time(), *(time.process_time() for _ in results)]
        return [end - start for start, end in itertools.pairwise(marks)]

    times: dict[str, list[list[float]]] = {"loop": [], "pipeline_map": []}
    for _ in range(rounds + 1):  # one to warm up
        times["loop"].append(seconds_of_runs(run(model, item) for item in items))
        results = pipeline_map(model, run, items, max_in_flight=1)
        times["pipeline_map"].append(seconds_of_runs(results))
    loop, flight = (sum(map(min, zip(*each[1:]))) for each in times.values())
    return {"pipeline_map / loop": flight / loop, "a forward, s": loop / n_runs}


def views(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the bytes that are allocated on all devices together when views are made."""
    with tl_devicefix.simulate(4) as machine:
        model = shipped(4)
        before = sum(map(machine.memory_allocated, machine.devices))
        made = [adapter_of(model).view_of(model) for _ in range(5)]
        after = sum(map(machine.memory_allocated, machine.devices))
        return {"views": len(made), "model_bytes": before, "copied_bytes": after - before}


PARTS: dict[str, Callable[[argparse.Namespace], Any]] = {
    "busy": busy,
    "clock": clock,
    "overhead": overhead,
    "views": views,
}


def main() -> None:
    """Measure and print tables; write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--n", nargs="+", type=int, default=[2, 4, 8], help="numbers of devices")
    parser.add_argument("--m", nargs="+", type=int, default=[1, 4, 16, 64], help="numbers of runs")
    parser.add_argument("--seconds", type=float, default=0.3, help="of a stage")
    parser.add_argument("--d-model", type=int, default=1024, help="for clock and overhead")
    parser.add_argument("--layers", type=int, default=4, help="for clock and overhead")
    parser.add_argument("--tokens", type=int, default=256, help="in each run of clock")
    parser.add_argument("--runs", type=int, default=20, help="of clock")
    parser.add_argument("--rounds", type=int, default=3, help="of clock")
    parser.add_argument("--overhead-rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"no part is called {unknown.pop()}: choose from {', '.join(PARTS)}")

    # A core for each device; the shipped model is slower with more threads.
    torch.set_num_threads(1)
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

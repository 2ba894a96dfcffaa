"""The cost of saving activations: memory, time compared with discarding them, and reading back.

    python benchmarks/save_activations.py [memory] [wall] [slow] [read] [importing] [--size 256]
        [--batches 40] [--rounds 3] [--shard-size 2MiB] [--to DIRECTORY] [--json FILE]

A random model of four blocks runs on the CPU, and two of its activations are written to a temporary
directory in `--to`. Peak memory is the process's anonymous memory ("Anonymous" in
/proc/self/smaps_rollup, sampled every 5 ms) beyond what it was before.

    memory     peaks of saving, also for ten times as many batches, each in a new process
    wall       time of saving / of the same runs whose activations are discarded, in turns
    slow       a writer slowed to half the activations' rate: the call's rate / the writer's; peak
    read       rate of reading a layer / safetensors'; of shuffled batches / of reading the layer
    importing  CPU time of the imports of scripts that read, and of one that saves
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors import safe_open
from transformer_lens import HookedTransformer, HookedTransformerConfig

import tl_devicefix
from tl_devicefix.activation_store import writer
from tl_devicefix.activation_store.format import (
    MASK,
    TOKENS,
    Index,
    Shard,
    StoredTensor,
    shard_name,
    write_index,
    write_shard,
)

NAMES = ["blocks.1.hook_resid_post", "blocks.3.hook_resid_post"]
PARTS = ("memory", "wall", "slow", "read", "importing")
IMPORTS = (
    "import tl_devicefix",
    "import torch",
    "import tl_devicefix; tl_devicefix.load_activations",
    "import tl_devicefix; tl_devicefix.save_activations",
)
BATCH, POSITIONS = 8, 64


def main() -> None:
    """Measure, and print a line for each figure."""
    options = arguments()
    torch.set_num_threads(1)
    if options.peak:
        print(json.dumps(peak_of_saving(options)))
        return
    found: dict[str, float] = {}
    for part in options.parts or PARTS:
        found |= globals()[part](options)
    for name, value in found.items():
        print(f"{name:<64}{value:12.3f}")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


def arguments() -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []])
    parser.add_argument("--size", type=int, default=256, help="d_model")
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shard-size", default="2MiB")
    parser.add_argument("--to", type=Path, help="where to make temporary directories")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peak", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def model_of(options: argparse.Namespace) -> Any:
    """Return a random model."""
    config = HookedTransformerConfig(
        n_layers=4,
        d_model=options.size,
        n_ctx=POSITIONS,
        d_head=64,
        n_heads=options.size // 64,
        d_mlp=4 * options.size,
        d_vocab=1000,
        act_fn="gelu",
        device="cpu",
        seed=0,
    )
    return HookedTransformer(config)


def batches_of(count: int) -> Iterator[torch.Tensor]:
    """Yield `count` batches, each made on demand."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        yield torch.randint(0, 1000, (BATCH, POSITIONS), generator=generator)


def saved(model: Any, count: int, options: argparse.Namespace, to: str) -> Any:
    """Save the activations of `count` batches."""
    return tl_devicefix.save_activations(
        *(model, batches_of(count), NAMES),
        directory=to,
        shard_size=options.shard_size,
        progress=False,
    )


def run_only(model: Any, count: int) -> None:
    """Do the same runs, and discard the activations."""

    def run(view: Any, batch: torch.Tensor) -> None:
        view.run_with_cache(batch, names_filter=NAMES, return_type=None)

    with torch.no_grad():
        for _ in tl_devicefix.pipeline_map(model, run, batches_of(count)):
            pass


def directory(options: argparse.Namespace) -> tempfile.TemporaryDirectory[str]:
    """Make a temporary directory in `--to`."""
    return tempfile.TemporaryDirectory(dir=options.to)


class Peak:
    """The peak of this process's anonymous memory in a `with` block, in MiB beyond the start's."""

    def __enter__(self) -> Peak:
        self._before = self.mib = anonymous()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(0.005):
            self.mib = max(self.mib, anonymous())

    def __exit__(self, *error: Any) -> None:
        self._over.set()
        self._thread.join()
        self.in_all = self.mib
        self.mib -= self._before


def anonymous() -> float:
    """Return the MiB of this process's anonymous memory."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("this system does not report a process's anonymous memory: use Linux")


def peak_of_saving(options: argparse.Namespace) -> list[float]:
    """Return the peak beyond the start, and in total, after a first save that loads modules."""
    model = model_of(options)
    with directory(options) as warm, directory(options) as to:
        saved(model, 2, options, warm)
        with Peak() as peak:
            saved(model, options.batches, options, to)
    return [peak.mib, peak.in_all]


def memory(options: argparse.Namespace) -> dict[str, float]:
    """Measure the peaks of saving, and of saving ten times as many batches."""
    peaks = []
    for count in (options.batches, 10 * options.batches):
        command = [sys.executable, __file__, "--peak", "--batches", str(count)]
        command += ["--size", str(options.size), "--shard-size", options.shard_size]
        command += ["--to", str(options.to)] if options.to else []
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        peaks.append(json.loads(said.splitlines()[-1]))
    return {
        "peak of saving beyond the start, MiB": peaks[0][0],
        "the same with ten times as many batches, MiB": peaks[1][0],
        "peak of the whole process, the latter / the former": peaks[1][1] / peaks[0][1],
    }


def seconds(job: Callable[[], Any]) -> float:
    """Return how long a call takes."""
    start = time.perf_counter()
    job()
    return time.perf_counter() - start


def wall(options: argparse.Namespace) -> dict[str, float]:
    """Compare saving with discarding."""
    model, discarded, written = model_of(options), [], []
    run_only(model, 2)
    for _ in range(options.rounds):
        discarded.append(seconds(lambda: run_only(model, options.batches)))
        with directory(options) as to:
            written.append(seconds(lambda to=to: saved(model, options.batches, options, to)))
    n_bytes = options.batches * BATCH * POSITIONS * options.size * 4 * len(NAMES)
    return {
        "seconds, discarded": statistics.median(discarded),
        "seconds, written": statistics.median(written),
        "MiB/s written": n_bytes / 2**20 / statistics.median(written),
        "written / discarded": statistics.median(w / d for w, d in zip(written, discarded)),
    }


def slow(options: argparse.Namespace) -> dict[str, float]:
    """Measure a writer that is slowed to half the rate at which activations arrive."""
    model = model_of(options)
    with directory(options) as to, Peak() as usual:
        saved(model, options.batches, options, to)
    n_bytes = options.batches * BATCH * POSITIONS * options.size * 4 * len(NAMES)
    ratios, peaks = [], []
    for _ in range(options.rounds):
        rate = n_bytes / seconds(lambda: run_only(model, options.batches)) / 2
        with directory(options) as to, slowed_to(rate), Peak() as peak:
            took = seconds(lambda to=to: saved(model, options.batches, options, to))
        ratios.append(n_bytes / took / rate)
        peaks.append(peak.in_all / usual.in_all)
    return {
        # The best round: if other jobs slow the model down after the rate was measured, the writer
        # waits for it.
        "slow writer: bytes a second / its rate, best round": max(ratios),
        "slow writer: peak of the whole process / that of one not slowed": statistics.median(peaks),
    }


@contextlib.contextmanager
def slowed_to(rate: float) -> Iterator[None]:
    """Write shards at `rate` bytes a second within a `with` block."""
    write, began, so_far = writer.write_shard, [], [0]

    def slowly(*args: Any) -> tuple[int, str]:
        began.append(time.perf_counter())
        written = write(*args)
        so_far[0] += written[0]
        time.sleep(max(0, began[0] + so_far[0] / rate - time.perf_counter()))
        return written

    with mock.patch.object(writer, "write_shard", slowly):
        yield


def random_activations(to: Path) -> Any:
    """Write sixteen shards of two layers, 4096 wide in bfloat16: 32 MiB of each layer a shard."""
    width, n_examples = 4096, 64
    entries = [
        StoredTensor(TOKENS, "int64", (POSITIONS,)),
        StoredTensor(MASK, "bool", (POSITIONS,)),
    ]
    entries += [StoredTensor(name, "bfloat16", (POSITIONS, width)) for name in NAMES]
    index = Index({}, {}, tuple(entries), n_examples, is_complete=True)
    rows = {e.name: torch.ones(n_examples, *e.shape, dtype=e.torch_dtype) for e in entries}
    for number in range(16):
        start, name = number * n_examples, shard_name(number)
        stop = start + n_examples
        written = write_shard(to / name, {each: [rows[each]] for each in rows}, start, stop)
        shard = Shard(name, start, stop, n_examples * POSITIONS, *written)
        index = replace(index, shards=(*index.shards, shard))
    write_index(to, index)
    return tl_devicefix.load_activations(to)


def read(options: argparse.Namespace) -> dict[str, float]:
    """Measure reading back files that are in the page cache."""
    ratios, shuffled = [], []
    with directory(options) as to:
        found = random_activations(Path(to))
        name, n_bytes = NAMES[0], 2 * torch.Size(found[NAMES[0]].shape).numel()
        step = 16  # examples: 8 MiB, like a batch, for which the allocator reuses memory

        def by_safetensors() -> None:
            for shard in found.index.shards:
                with safe_open(found.directory / shard.file, "pt") as file:
                    for piece in file.get_tensor(name).split(step):
                        piece.clone()

        def by_slices() -> None:
            for start in range(0, len(found), found.index.examples_per_shard):
                read = found[name][start : start + found.index.examples_per_shard]
                for piece in read.split(step):
                    piece.clone()

        def in_batches() -> None:
            for _ in found.activations(name, 1024):
                pass

        with Peak() as peak:  # first: it could reuse memory that the others free
            in_batches()
        for _ in range(max(5, options.rounds)):
            alone, ours, batches = map(seconds, (by_safetensors, by_slices, in_batches))
            ratios.append(alone / ours)
            shuffled.append(ours / batches)
    return {
        "a layer read, GiB/s": n_bytes / 2**30 / ours,
        "rate of reading a layer / of safetensors alone": statistics.median(ratios),
        "rate of shuffled batches / of reading a layer": statistics.median(shuffled),
        "shuffled batches: peak / two shards' bytes": peak.mib
        * 2**20
        / (2 * found.index.shards[0].bytes),
    }


def importing(options: argparse.Namespace) -> dict[str, float]:
    """Measure imports in turns: the least CPU time of each, minus that of starting Python."""

    def started(script: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        environment = {**os.environ, "TL_DEVICEFIX_DISABLE": "1"}
        subprocess.run([sys.executable, "-c", script], env=environment, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    scripts = ("", *IMPORTS)
    rounds = [[started(script) for script in scripts] for _ in range(options.rounds)]
    nothing, *least = (min(times) for times in zip(*rounds))
    return {f"CPU seconds of {s}": taken - nothing for s, taken in zip(IMPORTS, least)}


if __name__ == "__main__":
    main()

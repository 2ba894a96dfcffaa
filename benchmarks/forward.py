"""What a forward costs: transformers, TransformerLens as installed, and this package, side by side.

    python benchmarks/forward.py [--size 1.1B] [--dtypes float32 bfloat16] [--device cpu]
                                 [--tokens 128 1024 8192] [--batches 1 8] [--context 1024]
                                 [--new 16] [--repeats 5] [--threads 2] [--limit 600] [--bridge]
                                 [--ways WAY ...] [--cache DIR] [--json FILE]

A Llama with random weights is loaded in five ways, each in a process of its own:

    transformers eager
    transformers sdpa
    TransformerLens       without this package
    here                  with this package: another memory layout of the weights
    here fused            the same, with `fuse_blocks(model)`

Each way prefills `--tokens`, and generates `--new` tokens after `--context` tokens in a KV cache,
for each of `--batches`. The processes take turns after each forward or token, since a machine's
speed varies.

Wall and CPU seconds are medians; for generation, those of one token of the whole batch. Ratios are
medians of the ratios of neighbouring forwards. Memory is the peak of the process's anonymous memory
(RssAnon), or of the device's memory, beyond what it was after loading. What would not fit in
memory, or takes more than `--limit` seconds, is left out, with the reason.

With `--bridge`, and where TransformerLens has no HookedTransformer, a TransformerBridge is booted.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from load import HUB_NAME, anonymous_memory
from load import SIZES as SIZES_OF_LOADS
from packaging.version import Version

SIZES = {
    **SIZES_OF_LOADS,
    "small": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4,
              "num_attention_heads": 8, "num_key_value_heads": 1, "vocab_size": 16000},
    # The unembedding is small, so that half of the blocks do half of the work.
    "deep": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8,
             "num_attention_heads": 8, "num_key_value_heads": 1, "vocab_size": 4000},
    # Kernels take next to no time, so this measures Python (`launch.py`).
    "launch": {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 10,
               "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000},
}  # fmt: skip
WAYS = ("transformers eager", "transformers sdpa", "TransformerLens", "here", "here fused")
FLOORS = ("transformers sdpa", "TransformerLens")
BYTES_OF_A_SCORE = 17
"""For each score at the peak, in float32: score, pattern, NaN mask, zeros and result."""

Result = dict[str, list[dict[str, Any]]]
"""Name of a way -> what each of its steps took."""


@dataclass(frozen=True)
class Cell:
    """One measurement: a prefill or a generation, in one way."""

    way: str
    dtype: str
    batch: int
    tokens: int
    new: int
    """How many tokens are generated; 0 if it is a prefill."""

    def __str__(self) -> str:
        if self.new:
            return f"{self.dtype}, a token of {self.batch} after {self.tokens}"
        return f"{self.dtype}, prefill of {self.tokens}"


def make_checkpoint(cache: Path, size: str, positions: int, device: str, **shape: int) -> None:
    """Lay out a hub cache with random weights, made on `device`, under `HUB_NAME`.

    `shape` overrides entries of `SIZES`. An existing checkpoint is replaced.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    import tl_devicefix

    repository = cache / f"models--{HUB_NAME.replace('/', '--')}"
    snapshot = repository / "snapshots" / "0"
    shutil.rmtree(repository, ignore_errors=True)
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0")
    config = LlamaConfig(
        **{**SIZES[size], **shape}, max_position_embeddings=positions, tie_word_embeddings=False
    )
    torch.manual_seed(0)
    with torch.device(device):
        LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).save_pretrained(snapshot)
    shipped = Path(tl_devicefix.__file__).parent / "demo" / "recall_checkpoint"
    for file in shipped.glob("*token*"):
        shutil.copy(file, snapshot)


def load(way: str, dtype: torch.dtype, device: str | None, bridge: bool, **options: Any) -> Any:
    """Load the model in one of the ways compared; `options` are for TransformerLens's loaders."""
    if way.startswith("transformers"):
        from transformers import AutoModelForCausalLM

        name = "dtype" if version("transformers") >= "4.56" else "torch_dtype"
        model = AutoModelForCausalLM.from_pretrained(
            HUB_NAME, **{name: dtype}, attn_implementation=way.split()[1]
        )
        return model.to(device).eval()
    if way != "TransformerLens":
        import tl_devicefix
    if bridge:
        from transformer_lens.model_bridge import TransformerBridge

        loaded = TransformerBridge.boot_transformers(
            HUB_NAME, dtype=dtype, device=device, **options
        )
    else:
        from transformer_lens import HookedTransformer

        loaded = HookedTransformer.from_pretrained_no_processing(
            HUB_NAME, dtype=dtype, device=device, **options
        )
    if way == "here fused":
        tl_devicefix.fuse_blocks(loaded)
    return loaded


def forward_of(way: str, model: Any, bridge: bool) -> Callable[[torch.Tensor], Any]:
    """Return a function from tokens to logits."""
    if way.startswith("transformers"):
        return lambda tokens: model(tokens, use_cache=False).logits
    if bridge:
        return lambda tokens: model(tokens, use_cache=False)
    return lambda tokens: model(tokens)


def continuing(way: str, model: Any, bridge: bool, batch: int) -> Callable[[torch.Tensor], Any]:
    """Return a function from new tokens to logits that keeps earlier tokens in a KV cache."""
    if bridge or way.startswith("transformers"):
        from transformers import DynamicCache

        cache = DynamicCache()
        get = (lambda output: output) if bridge and "formers" not in way else (lambda o: o.logits)
        return lambda tokens: get(model(tokens, past_key_values=cache, use_cache=True))
    import transformer_lens

    older, newer = "HookedTransformerKeyValueCache", "TransformerLensKeyValueCache"
    cls = getattr(transformer_lens, newer if hasattr(transformer_lens, newer) else older)
    past = cls.init_cache(model.cfg, model.cfg.device, batch)
    return lambda tokens: model(tokens, past_kv_cache=past)


def answer(way: str, dtype: str, device: str, bridge: bool, threads: int) -> None:
    """Load a model, and do what the parent process asks for line by line."""
    torch.set_num_threads(threads)
    model = load(way, getattr(torch, dtype), device, bridge)
    on_gpu = torch.device(device).type == "cuda"
    with torch.inference_mode():
        forward_of(way, model, bridge)(torch.randint(3, 1000, (1, 16)).to(device))
        report()
        for line in sys.stdin:
            cell = Cell(**json.loads(line))
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            at_start = torch.cuda.memory_allocated() if on_gpu else 0
            for wall, cpu in steps(cell, model, device, bridge):
                peak = torch.cuda.max_memory_allocated() - at_start if on_gpu else None
                report(wall_s=wall, cpu_s=cpu, device_peak=peak)
                if sys.stdin.readline() != "go on\n":
                    break
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)  # otherwise freed memory would count for the next cell
            report()


def report(**found: Any) -> None:
    """Send results to the parent process."""
    print("MEASURED", json.dumps(found), flush=True)


def steps(cell: Cell, model: Any, device: str, bridge: bool) -> Iterator[tuple[float, float]]:
    """Yield wall and CPU seconds of each forward or token; the first one warms up or prefills."""
    tokens = torch.randint(3, 1000, (cell.batch, cell.tokens)).to(device)
    run = forward_of(cell.way, model, bridge)
    if cell.new:
        run = continuing(cell.way, model, bridge, cell.batch)
    while True:
        wall, cpu = time.perf_counter(), time.process_time()
        logits = run(tokens)
        if logits.is_cuda:
            torch.cuda.synchronize()
        yield time.perf_counter() - wall, time.process_time() - cpu
        if cell.new:
            tokens = logits[:, -1:].argmax(-1)


class Way:
    """A process with a model that was loaded in one way. This process watches its memory.

    Args:
        name: one of `WAYS`.
        dtype: the dtype of the model.
        cache: the hub cache with the checkpoint.
        arguments: the command line.
    """

    def __init__(self, name: str, dtype: str, cache: Path, arguments: argparse.Namespace) -> None:
        self._limit, self._size = arguments.limit, arguments.size
        self._device = arguments.device
        self._ended: str | None = None
        self.why: str | None = None
        """The reason if the way has no results."""
        offline = {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1", "TL_DEVICEFIX_DISABLE": ""}
        options = json.dumps([name, dtype, arguments.device, arguments.bridge, arguments.threads])
        # A file: a pipe that nobody reads could fill.
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._child = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, "--answer", options],
            env={**os.environ, **offline},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            bufsize=0,
        )
        self.wait()
        self._at_start = self.peak = anonymous_memory(self._child.pid)

    def begin(self, cell: Cell) -> dict[str, Any] | None:
        """Do the first step of a cell. Return None if that fails; `why` then has the reason."""
        self.peak = self._at_start
        self.why = self._ended or why_too_large(cell, self._size, self._device)
        return None if self.why else self.ask(json.dumps(asdict(cell)))

    def ask(self, line: str) -> dict[str, Any] | None:
        """Send a line to the process, and return its answer; None if it has ended."""
        assert self._child.stdin is not None
        if self._ended is not None:
            return None
        self._child.stdin.write(f"{line}\n".encode())
        found = self.wait()
        if found and found.get("device_peak") is None:
            found["device_peak"] = self.peak - self._at_start
        return found

    def wait(self) -> dict[str, Any] | None:
        """Wait for an answer, and record the process's peak memory until then."""
        assert self._child.stdout is not None
        until = time.monotonic() + self._limit
        while True:
            self.peak = max(getattr(self, "peak", 0), anonymous_memory(self._child.pid))
            if select.select([self._child.stdout], [], [], 0.005)[0]:
                line = self._child.stdout.readline().decode()
                if line.startswith("MEASURED"):
                    return dict(json.loads(line.removeprefix("MEASURED")))
                if not line:
                    self._stderr.seek(0)
                    said = self._stderr.read().strip().splitlines() or ["nothing said"]
                    return self._end(f"ended with {self._child.wait()}: {said[-1][:200]}")
            if time.monotonic() > until:
                return self._end(f"took more than {self._limit:.0f} s")

    def end(self) -> None:
        """End the process."""
        self._child.kill()
        self._child.wait()

    def _end(self, why: str) -> None:
        self.why = self._ended = why
        self.end()


def why_too_large(cell: Cell, size: str, device: str) -> str | None:
    """Return why a cell would not fit in the free memory; None if it would."""
    shape, itemsize = SIZES[size], getattr(torch, cell.dtype).itemsize
    logits = itemsize * cell.batch * cell.tokens * shape["vocab_size"]
    builds = cell.way not in ("transformers sdpa", "here fused")
    scores = cell.batch * shape["num_attention_heads"] * cell.tokens**2 * BYTES_OF_A_SCORE
    needed = logits + builds * scores
    free = free_memory(device)
    if needed <= free:
        return None
    return f"about {needed / 1e9:.1f} GB needed, {free / 1e9:.1f} GB free"


def free_memory(device: str) -> int:
    """Return the free bytes on the device, or in host memory."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(each.split()[1]) * 1024 for each in lines if each.startswith("MemAvailable"))


def compare(ways: dict[str, Way], cells: list[Cell], arguments: argparse.Namespace) -> Result:
    """Return what each step of each way took; nothing for a way that failed (see its `why`).

    The first step is left out if there are others: in generation it is the prefill.
    """
    found = {cell.way: [first] for cell in cells if (first := ways[cell.way].begin(cell))}
    until = time.monotonic() + arguments.limit
    for _ in range(cells[0].new or arguments.repeats):
        for name, steps in found.items():
            if time.monotonic() < until and (step := ways[name].ask("go on")):
                steps.append(step)
    for name in found:
        ways[name].ask("enough")
    return {cell.way: found.get(cell.way, [])[1:] or found.get(cell.way, []) for cell in cells}


def show(what: str, result: Result, ways: dict[str, Way]) -> None:
    """Print a table: what each way takes, and its ratios to `FLOORS`."""
    over = "".join(f" | {'/ ' + floor:^23}" for floor in FLOORS)
    print(f"\n{what:<44}{over}")
    ratios = " | " + " ".join(f"{name:>7}" for name in ("wall", "CPU", "memory"))
    print(f"{'':<19}{'wall s':>8} {'CPU s':>8} {'MB':>7}{ratios * len(FLOORS)}")
    for way, runs in result.items():
        if not runs:
            print(f"{way:<19}left out: {ways[way].why}")
            continue
        line = f"{way:<19}{median(runs, 'wall_s'):>8.3f} {median(runs, 'cpu_s'):>8.3f}"
        line += f" {peak(runs) / 1e6:>7.0f}"
        for floor in FLOORS:
            others = result.get(floor) or []
            values = [ratio(runs, others, key) for key in ("wall_s", "cpu_s")]
            values.append(peak(runs) / peak(others) if others and peak(others) else None)
            line += " | " + " ".join(f"{'':>7}" if v is None else f"{v:>7.2f}" for v in values)
        print(line, flush=True)


def median(runs: list[dict[str, Any]], key: str) -> float:
    """Return the median of what the steps took."""
    return statistics.median(run[key] for run in runs)


def peak(runs: list[dict[str, Any]]) -> int:
    """Return the peak in bytes, beyond the memory of the loaded model."""
    return max(run["device_peak"] for run in runs)


def ratio(runs: list[dict[str, Any]], others: list[dict[str, Any]], key: str) -> float | None:
    """Return the median ratio of two ways' steps, paired by turn."""
    ratios = [run[key] / other[key] for run, other in zip(runs, others) if other[key]]
    return statistics.median(ratios) if ratios else None


def things(dtype: str, arguments: argparse.Namespace) -> list[list[Cell]]:
    """Return, for each prefill or generation in one dtype, a cell of each way."""
    asked = [(1, tokens, 0) for tokens in arguments.tokens]
    asked += [(batch, arguments.context, arguments.new) for batch in arguments.batches]
    return [[Cell(way, dtype, *thing) for way in arguments.ways] for thing in asked]


def parse() -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="1.1B")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--tokens", nargs="*", type=int, default=[128, 1024, 8192])
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 8])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--new", type=int, default=16, help="tokens to generate")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--repeats", type=int, default=5, help="forwards of each way")
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="torch's threads on the CPU"
    )
    parser.add_argument("--limit", type=float, default=600, help="seconds of a step or a table")
    parser.add_argument(
        "--bridge",
        action="store_true",
        default=Version(version("transformer_lens")) >= Version("4.dev0"),
        help="boot a TransformerBridge",
    )
    parser.add_argument("--cache", type=Path, help="keep the checkpoint here, for this size")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    """Measure and print tables; write JSON if asked."""
    if sys.argv[1:2] == ["--answer"]:
        answer(*json.loads(sys.argv[2]))
        return
    arguments = parse()
    model = "TransformerBridge" if arguments.bridge else "HookedTransformer"
    print(
        f"{model} of transformer_lens {version('transformer_lens')}, "
        f"transformers {version('transformers')}, torch {version('torch')}, "
        f"{arguments.size} on {arguments.device}, {arguments.threads} threads"
    )
    cache = arguments.cache or Path(tempfile.mkdtemp())
    results = {}
    try:
        if not list(cache.glob("models--*")):
            positions = max([*arguments.tokens, arguments.context + arguments.new])
            make_checkpoint(cache, arguments.size, positions, arguments.device)
        for dtype in arguments.dtypes:
            ways = {name: Way(name, dtype, cache, arguments) for name in arguments.ways}
            for cells in things(dtype, arguments):
                what = str(cells[0])
                results[what] = compare(ways, cells, arguments)
                show(what, results[what], ways)
            for way in ways.values():
                way.end()
    finally:
        if not arguments.cache:
            shutil.rmtree(cache)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""What a forward costs: transformers, TransformerLens as installed, and this package, side by side.

    python benchmarks/forward.py [--size 1.1B] [--dtypes float32 bfloat16] [--device cpu]
                                 [--tokens 128 1024 8192] [--batches 1 8] [--context 1024]
                                 [--rounds 1] [--limit 600] [--bridge] [--json FILE]

A Llama with random weights is loaded by transformers (eager, and with SDPA), by TransformerLens
without this package, and by this package as installed and with `attention(model, "sdpa")`. Each
prefills `--tokens`, and generates `--new` tokens behind `--context` tokens in a KV cache, for
`--batches`. Every measurement is in a process of its own, the ways taking turns.

Wall and CPU seconds are the median of some forwards, after a short one; for generation they are
those of one token for all of the batch. Memory is what the process's anonymous memory (RssAnon), or
the device's, was at its peak beyond what it was once the model was loaded. What would not fit in
memory, or takes more than `--limit` seconds, is left out, and said.

With `--bridge`, and where TransformerLens has no HookedTransformer, a TransformerBridge is booted.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version

# A Llama by a name whose sizes TransformerLens reads from its config.
HUB_NAME = "01-ai/Yi-6B"
SIZES = {
    "tiny": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4,
             "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 1000},
    "small": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4,
              "num_attention_heads": 8, "num_key_value_heads": 1, "vocab_size": 16000},
    "1.1B": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
             "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000},
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
           "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
}  # fmt: skip
WAYS = ("transformers eager", "transformers sdpa", "TransformerLens", "here", "here sdpa")
FLOORS = ("transformers sdpa", "TransformerLens")
BYTES_OF_A_SCORE = 17
"""At the peak, where scores are built: scores, pattern, where it is NaN, zeros, and the result."""

SECONDS = 2.0
"""How long short forwards are repeated."""


@dataclass(frozen=True)
class Cell:
    """One thing to measure."""

    way: str
    dtype: str
    batch: int
    tokens: int
    new: int
    """How many tokens are generated; 0 if it is a prefill."""

    def __str__(self) -> str:
        if self.new:
            return f"{self.dtype}, a token of {self.batch} behind {self.tokens}"
        return f"{self.dtype}, prefill of {self.tokens}"


def make_checkpoint(cache: Path, size: str, positions: int, device: str) -> None:
    """Lay out a hub cache with random weights, made on `device`, under `HUB_NAME`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import tl_devicefix

    repository = cache / f"models--{HUB_NAME.replace('/', '--')}"
    snapshot = repository / "snapshots" / "0"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0")
    config = LlamaConfig(
        **SIZES[size], max_position_embeddings=positions, tie_word_embeddings=False
    )
    torch.manual_seed(0)
    with torch.device(device):
        LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).save_pretrained(snapshot)
    shipped = Path(tl_devicefix.__file__).parent / "demo" / "recall_checkpoint"
    for file in shipped.glob("*token*"):
        shutil.copy(file, snapshot)


def load(way: str, dtype: torch.dtype, device: str, bridge: bool) -> Any:
    """The model, loaded in one of the ways compared."""
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

        loaded = TransformerBridge.boot_transformers(HUB_NAME, dtype=dtype, device=device)
    else:
        from transformer_lens import HookedTransformer

        loaded = HookedTransformer.from_pretrained_no_processing(
            HUB_NAME, dtype=dtype, device=device
        )
    if way == "here sdpa":
        tl_devicefix.attention(loaded, "sdpa")
    return loaded


def forward_of(way: str, model: Any, bridge: bool) -> Callable[[torch.Tensor], Any]:
    """What makes logits of tokens."""
    if way.startswith("transformers"):
        return lambda tokens: model(tokens, use_cache=False).logits
    if bridge:
        return lambda tokens: model(tokens, use_cache=False)
    return lambda tokens: model(tokens)


def continuing(way: str, model: Any, bridge: bool, batch: int) -> Callable[[torch.Tensor], Any]:
    """What makes logits of tokens behind all tokens that it was given before, in a KV cache."""
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


def run_in_this_process(cell: Cell, device: str, bridge: bool, repeats: int, limit: float) -> None:
    """Measure one cell, telling the parent process when the model is loaded."""
    model = load(cell.way, getattr(torch, cell.dtype), device, bridge)
    forward = forward_of(cell.way, model, bridge)
    tokens = torch.randint(3, 1000, (cell.batch, cell.tokens)).to(device)
    on_gpu = torch.device(device).type == "cuda"
    timed: list[tuple[float, float]] = []

    def time_it(run: Callable[[torch.Tensor], Any], given: torch.Tensor) -> torch.Tensor:
        wall, cpu = time.perf_counter(), time.process_time()
        logits = run(given)
        if on_gpu:
            torch.cuda.synchronize()
        timed.append((time.perf_counter() - wall, time.process_time() - cpu))
        return logits[:, -1:].argmax(-1)

    with torch.inference_mode():
        forward(tokens[:, :16])
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        at_start = torch.cuda.memory_allocated() if on_gpu else 0
        print("MEASURE start", flush=True)
        sys.stdin.readline()
        begun = time.perf_counter()
        if cell.new:
            run = continuing(cell.way, model, bridge, cell.batch)
            token = time_it(run, tokens)
            timed.clear()
            for _ in range(cell.new):
                token = time_it(run, token)
        else:
            while is_wanted(len(timed), time.perf_counter() - begun, repeats, limit):
                time_it(forward, tokens)
    device_peak = torch.cuda.max_memory_allocated() - at_start if on_gpu else None
    wall, cpu = (statistics.median(each) for each in zip(*timed))
    print("MEASURE", json.dumps({"wall_s": wall, "cpu_s": cpu, "device_peak": device_peak}))


def is_wanted(done: int, seconds: float, repeats: int, limit: float) -> bool:
    """Whether one more forward is to be timed, after some that took so long in all."""
    return done == 0 or (seconds < limit / 3 and (done < repeats or seconds < SECONDS))


def measure(cache: Path, cell: Cell, arguments: argparse.Namespace) -> dict[str, Any] | str:
    """Measure one cell in a new process, and its memory from here; why not, if it cannot be."""
    offline = {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1", "TL_DEVICEFIX_DISABLE": ""}
    told = [arguments.device, arguments.bridge, arguments.repeats, arguments.limit]
    with tempfile.TemporaryFile("w+") as stderr:  # a pipe that nobody reads could fill
        child = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, "--run", json.dumps([asdict(cell), *told])],
            env={**os.environ, **offline},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
        assert child.stdin is not None
        assert child.stdout is not None
        while (line := child.stdout.readline()) and not line.startswith("MEASURE start"):
            pass
        at_start = peak = anonymous_memory(child.pid)
        until = time.monotonic() + arguments.limit
        if line:
            child.stdin.write("\n")
            child.stdin.flush()
        while child.poll() is None:
            peak = max(peak, anonymous_memory(child.pid))
            time.sleep(0.005)
            if time.monotonic() > until:
                child.kill()
                child.wait()
                return f"took more than {arguments.limit:.0f} s"
        output = child.stdout.read()
        if child.returncode:
            stderr.seek(0)
            said = stderr.read().strip().splitlines() or ["nothing said"]
            return f"ended with {child.returncode}: {said[-1][:200]}"
    results = next(line for line in output.splitlines() if line.startswith("MEASURE"))
    found = json.loads(results.removeprefix("MEASURE"))
    in_device = found.pop("device_peak")
    return {**found, "peak": peak - at_start if in_device is None else in_device}


def anonymous_memory(pid: int) -> int:
    """The process's RssAnon in bytes; 0 when it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    found = [line.split() for line in status.splitlines() if line.startswith("RssAnon")]
    return int(found[0][1]) * 1024 if found else 0


def why_too_large(cell: Cell, size: str, device: str) -> str | None:
    """Why a cell would not fit in the memory that is free now; None if it would."""
    shape, itemsize = SIZES[size], getattr(torch, cell.dtype).itemsize
    hidden, layers, vocab = (shape[f"{n}_size"] for n in ("hidden", "intermediate", "vocab"))
    of_heads = 2 + 2 * shape["num_key_value_heads"] / shape["num_attention_heads"]
    a_block = hidden * (of_heads * hidden + 3 * layers)
    weights = itemsize * (shape["num_hidden_layers"] * a_block + 2 * vocab * hidden)
    logits = itemsize * cell.batch * cell.tokens * vocab
    builds = cell.way not in ("transformers sdpa", "here sdpa")
    scores = cell.batch * shape["num_attention_heads"] * cell.tokens**2 * BYTES_OF_A_SCORE
    needed = weights + logits + builds * scores
    free = free_memory(device)
    if needed <= free:
        return None
    return f"about {needed / 1e9:.1f} GB needed, {free / 1e9:.1f} GB free"


def free_memory(device: str) -> int:
    """Bytes free on the device, or in the host's memory."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(each.split()[1]) * 1024 for each in lines if each.startswith("MemAvailable"))


def compare(cache: Path, cells: list[Cell], arguments: argparse.Namespace) -> dict[str, Any]:
    """Each way's medians of one thing, or why there are none."""
    runs: dict[str, Any] = {cell.way: [] for cell in cells}
    for _ in range(arguments.rounds):
        for cell in cells:
            if isinstance(runs[cell.way], str):
                continue
            why = why_too_large(cell, arguments.size, arguments.device)
            found = why or measure(cache, cell, arguments)
            if isinstance(found, str):
                runs[cell.way] = found
            else:
                runs[cell.way].append(found)
    return {
        way: of_way
        if isinstance(of_way, str)
        else {key: statistics.median(run[key] for run in of_way) for key in of_way[0]}
        for way, of_way in runs.items()
    }


def show(what: str, result: dict[str, Any]) -> None:
    """Print the table of one thing: what it takes, and over others."""
    over = "".join(f" | {'/ ' + floor:^23}" for floor in FLOORS)
    print(f"\n{what:<44}{over}")
    ratios = " | " + " ".join(f"{name:>7}" for name in ("wall", "CPU", "memory"))
    print(f"{'':<19}{'wall s':>8} {'CPU s':>8} {'MB':>7}{ratios * len(FLOORS)}")
    for way, run in result.items():
        if isinstance(run, str):
            print(f"{way:<19}left out: {run}")
            continue
        line = f"{way:<19}{run['wall_s']:>8.3f} {run['cpu_s']:>8.3f} {run['peak'] / 1e6:>7.0f}"
        for floor in FLOORS:
            other = result.get(floor)
            known = isinstance(other, dict)
            values = [
                f"{run[key] / other[key]:>7.2f}" if known and other[key] else f"{'':>7}"
                for key in ("wall_s", "cpu_s", "peak")
            ]
            line += " | " + " ".join(values)
        print(line, flush=True)


def things(arguments: argparse.Namespace) -> list[list[Cell]]:
    """What is compared: for each thing, the cell of each way."""
    asked = [(1, tokens, 0) for tokens in arguments.tokens]
    asked += [(batch, arguments.context, arguments.new) for batch in arguments.batches]
    return [
        [Cell(way, dtype, *thing) for way in arguments.ways]
        for dtype in arguments.dtypes
        for thing in asked
    ]


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="1.1B")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--tokens", nargs="*", type=int, default=[128, 1024, 8192])
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 8])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--new", type=int, default=16, help="tokens to generate")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--rounds", type=int, default=1, help="processes for each measurement")
    parser.add_argument("--repeats", type=int, default=3, help="forwards in a process")
    parser.add_argument("--limit", type=float, default=600, help="seconds for a process")
    parser.add_argument(
        "--bridge",
        action="store_true",
        default=Version(version("transformer_lens")) >= Version("4.dev0"),
        help="boot a TransformerBridge",
    )
    parser.add_argument("--cache", type=Path, help="keep the checkpoint here and use it again")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    """Measure and print tables; write JSON if asked."""
    if sys.argv[1:2] == ["--run"]:
        cell, *told = json.loads(sys.argv[2])
        run_in_this_process(Cell(**cell), *told)
        return
    arguments = parse()
    model = "TransformerBridge" if arguments.bridge else "HookedTransformer"
    print(
        f"{model} of transformer_lens {version('transformer_lens')}, "
        f"transformers {version('transformers')}, torch {version('torch')}, "
        f"{arguments.size} on {arguments.device}, {os.cpu_count()} cores"
    )
    cache = arguments.cache or Path(tempfile.mkdtemp())
    results = {}
    try:
        if not list(cache.glob("models--*")):
            positions = max([*arguments.tokens, arguments.context + arguments.new])
            make_checkpoint(cache, arguments.size, positions, arguments.device)
        for cells in things(arguments):
            what = str(cells[0])
            results[what] = compare(cache, cells, arguments)
            show(what, results[what])
    finally:
        if not arguments.cache:
            shutil.rmtree(cache)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()

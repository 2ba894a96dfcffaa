"""Loading a checkpoint: wall time and memory of stock TransformerLens, this package, and a floor.

    python benchmarks/load.py [--rounds 3] [--size 1.1B] [--device cpu] [--bridge] [--json FILE]

A Llama-shaped bfloat16 checkpoint in several shards is made in a hub cache and loaded by its hub
name, each time in a process of its own. The loaders take turns, so that noise hits all of them.
The floor is a plain `AutoModelForCausalLM.from_pretrained` and one private copy of each weight.

With `--bridge`, and where TransformerLens has no HookedTransformer, a TransformerBridge is booted
and, in the cases that are folded, put into compatibility mode.

Memory is the peak of the process's anonymous memory (RssAnon: without mapped files) beyond that
before the load, and the peak of the device's. Both are also divided by the size of the weights.
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
from importlib.metadata import version
from pathlib import Path
from typing import Any

from packaging.version import Version

# A name of a Llama whose sizes TransformerLens reads from config.json.
HUB_NAME = "01-ai/Yi-6B"
SIZES = {
    "tiny": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4,
             "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 1000},
    "1.1B": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
             "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000},
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
           "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
}  # fmt: skip
LOADERS = ("stock", "ours", "floor")
CASES = (("bfloat16", True), ("float32", True), ("bfloat16", False))


def make_checkpoint(cache: Path, size: str, device: str) -> None:
    """Lay out a hub cache with random weights, made on `device`, under `HUB_NAME`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import tl_devicefix

    repository = cache / f"models--{HUB_NAME.replace('/', '--')}"
    snapshot = repository / "snapshots" / "0"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0")
    config = LlamaConfig(**SIZES[size], max_position_embeddings=2048, tie_word_embeddings=False)
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # initially ones, which folding would not change
                parameter.normal_(1.0, 0.2)
    model.save_pretrained(snapshot, max_shard_size="500MB" if size != "8B" else "4GB")
    shipped = Path(tl_devicefix.__file__).parent / "demo" / "recall_checkpoint"
    for file in shipped.glob("*token*"):
        shutil.copy(file, snapshot)


def load(loader: str, dtype: str, processed: bool, device: str, bridge: bool) -> Any:
    """Load the checkpoint in one of the ways compared, and return everything to keep alive."""
    import torch

    if loader == "floor":
        from transformers import AutoModelForCausalLM

        placed = {} if device == "cpu" else {"device_map": device}
        name = "dtype" if version("transformers") >= "4.56" else "torch_dtype"
        model = AutoModelForCausalLM.from_pretrained(
            HUB_NAME, **{name: getattr(torch, dtype)}, **placed
        )
        # On another device, the weights are a private copy already.
        return model, [p.detach().clone() for p in model.parameters() if device == "cpu"]
    if bridge:
        from transformer_lens.model_bridge import TransformerBridge

        booted = TransformerBridge.boot_transformers(
            HUB_NAME, dtype=getattr(torch, dtype), device=device
        )
        if processed:
            booted.enable_compatibility_mode()
        return booted
    from transformer_lens import HookedTransformer

    of_processing = "from_pretrained" if processed else "from_pretrained_no_processing"
    load_model = getattr(HookedTransformer, of_processing)
    return load_model(HUB_NAME, dtype=getattr(torch, dtype), device=device)


def run_in_this_process(
    loader: str, dtype: str, processed: bool, device: str, bridge: bool
) -> None:
    """Load once, and report the start, the time and the device's peak to the parent process."""
    import torch
    import transformers  # noqa: F401

    if bridge:
        from transformer_lens.model_bridge import TransformerBridge  # noqa: F401
    else:
        from transformer_lens import HookedTransformer  # noqa: F401

    if loader == "ours":
        import tl_devicefix  # noqa: F401
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu:
        torch.zeros(1, device=device)
        torch.cuda.reset_peak_memory_stats()
    print("MEASURE start", flush=True)
    sys.stdin.readline()
    begun = time.perf_counter()
    held = load(loader, dtype, processed, device, bridge)
    if on_gpu:
        torch.cuda.synchronize()
    wall = time.perf_counter() - begun
    peak = torch.cuda.max_memory_allocated() if on_gpu else None
    print("MEASURE", json.dumps({"wall_s": wall, "device_peak": peak}), flush=True)
    del held


def measure(cache: Path, *arguments: str) -> dict[str, Any]:
    """Load in a new process and watch its anonymous memory from here."""
    for shard in cache.rglob("*.safetensors"):  # so that each run finds them in the page cache
        with shard.open("rb") as file:
            while file.read(2**24):
                pass
    offline = {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1", "TL_DEVICEFIX_DISABLE": ""}
    with tempfile.TemporaryFile("w+") as stderr:  # a pipe that nobody reads could fill
        child = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, "--load", *arguments],
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
        child.stdin.write("\n")
        child.stdin.flush()
        while child.poll() is None:
            peak = max(peak, anonymous_memory(child.pid))
            time.sleep(0.005)
        output = child.stdout.read()
        if child.returncode:
            stderr.seek(0)
            raise SystemExit(f"{' '.join(arguments)} failed:\n{stderr.read()[-3000:]}")
    results = next(line for line in output.splitlines() if line.startswith("MEASURE"))
    return {**json.loads(results.removeprefix("MEASURE")), "host_peak": peak - at_start}


def anonymous_memory(pid: int) -> int:
    """Return the process's RssAnon in bytes; 0 if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    found = [line.split() for line in status.splitlines() if line.startswith("RssAnon")]
    return int(found[0][1]) * 1024 if found else 0


def compare(cache: Path, case: tuple[str, bool], arguments: argparse.Namespace) -> dict[str, Any]:
    """Return every loader's median wall time and peaks for one case, and the ratios."""
    dtype, processed = case
    runs: dict[str, list[dict[str, Any]]] = {loader: [] for loader in arguments.loaders}
    for _ in range(arguments.rounds):
        for loader, of_loader in runs.items():
            run = measure(
                cache, loader, dtype, str(processed), arguments.device, str(arguments.bridge)
            )
            of_loader.append(run)
            print(f"  {loader:<6} {dtype} processed={processed} {run}", file=sys.stderr)
    weights = sum(f.stat().st_size for f in cache.rglob("*.safetensors"))
    weights *= 2 if dtype == "float32" else 1
    result: dict[str, Any] = {"dtype": dtype, "processed": processed, "weights": weights}
    for loader, of_loader in runs.items():
        medians = {
            key: statistics.median(run[key] for run in of_loader)
            for key, value in of_loader[0].items()
            if value is not None
        }
        result[loader] = {
            **medians,
            **{f"{k}_ratio": v / weights for k, v in medians.items() if k.endswith("peak")},
        }
    for other in ("stock", "floor"):
        if other in runs and "ours" in runs:
            result[f"wall_over_{other}"] = result["ours"]["wall_s"] / result[other]["wall_s"]
    return result


def show(results: list[dict[str, Any]]) -> None:
    """Print the table."""
    print(
        f"{'dtype':<9} {'folded':<6} {'loader':<6} {'wall s':>7} {'/ ours':>7} "
        f"{'host GB':>8} {'/ weights':>9} {'device GB':>9} {'/ weights':>9}"
    )
    for result in results:
        for loader in (name for name in LOADERS if name in result):
            run = result[loader]
            device = run.get("device_peak", 0)
            print(
                f"{result['dtype']:<9} {'yes' if result['processed'] else 'no':<6} {loader:<6} "
                f"{run['wall_s']:>7.2f} {run['wall_s'] / result['ours']['wall_s']:>7.2f} "
                f"{run['host_peak'] / 1e9:>8.2f} {run['host_peak_ratio']:>9.2f} "
                + (f"{device / 1e9:>9.2f} {run['device_peak_ratio']:>9.2f}" if device else "")
            )


def main() -> None:
    """Measure and print a table; write JSON if asked."""
    if sys.argv[1:2] == ["--load"]:
        loader, dtype, processed, device, bridge = sys.argv[2:]
        run_in_this_process(loader, dtype, processed == "True", device, bridge == "True")
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size", choices=SIZES, default="1.1B")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--bridge",
        action="store_true",
        default=Version(version("transformer_lens")) >= Version("4.dev0"),
        help="boot a TransformerBridge",
    )
    parser.add_argument("--loaders", nargs="+", choices=LOADERS, default=LOADERS)
    parser.add_argument("--cases", nargs="+", type=int, default=range(len(CASES)), metavar="N")
    parser.add_argument("--cache", type=Path, help="keep the checkpoint here, for this size")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    cache = arguments.cache or Path(tempfile.mkdtemp())
    try:
        if not list(cache.glob("models--*")):
            make_checkpoint(cache, arguments.size, arguments.device)
        results = [compare(cache, CASES[case], arguments) for case in arguments.cases]
    finally:
        if not arguments.cache:
            shutil.rmtree(cache)
    model = "TransformerBridge" if arguments.bridge else "HookedTransformer"
    print(
        f"{model} of transformer_lens {version('transformer_lens')}, "
        f"transformers {version('transformers')}, torch {version('torch')}, "
        f"{arguments.size} on {arguments.device}, {os.cpu_count()} cores"
    )
    show(results)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""A forward with every block offloaded, compared with accelerate's `cpu_offload` and a floor.

    python benchmarks/offload.py [--device cuda] [--size 8B] [--batch 1] [--ctx 512] [--rounds 5]
                                 [--dtype bfloat16] [--json FILE]

A Llama with random weights is loaded twice: as a HookedTransformer whose blocks are all offloaded,
and by transformers, each decoder layer under accelerate's `cpu_offload`. The rest of both is on the
device. Their forwards alternate in one process, so that noise on the machine hits both. The floor
is the bytes of all blocks, divided by the rate at which a block's pinned weights are copied to the
device in the same rounds: no forward that copies each weight once can be faster. If the device has
room for the whole model, a forward with nothing offloaded is timed too. Even if copies and
computation overlap perfectly, the offloaded forward takes the longer of that time and the floor.

Without a GPU it says so. `--device sim --size tiny` runs it on a simulated device, which shows that
it works; the times mean nothing there, and accelerate offloads nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

SIZES = {
    "tiny": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4,
             "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 1000},
    "1.1B": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
             "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000},
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
           "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
}  # fmt: skip


def make_checkpoint(directory: Path, size: str, dtype: torch.dtype, device: torch.device) -> None:
    """Save a Llama with random weights, made on the device if it is a real one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from tl_devicefix.demo.demo import CHECKPOINT

    config = LlamaConfig(**SIZES[size], max_position_embeddings=2048, tie_word_embeddings=False)
    torch.manual_seed(0)
    with torch.device("cpu" if device.type == "sim" else device):
        model = LlamaForCausalLM._from_config(config, dtype=dtype)
    model.save_pretrained(directory)
    for file in CHECKPOINT.glob("*token*"):
        shutil.copy(file, directory)


def load_ours(directory: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """Load a HookedTransformer with every block offloaded."""
    from transformer_lens import HookedTransformer

    import tl_devicefix  # noqa: F401

    with contextlib.redirect_stdout(io.StringIO()):
        return HookedTransformer.from_pretrained_no_processing(
            str(directory), device_map={"": device, "blocks": "cpu"}, dtype=dtype
        )


def load_theirs(directory: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """Load the same weights in transformers, each layer under accelerate's `cpu_offload`."""
    from accelerate import cpu_offload
    from transformers import AutoModelForCausalLM

    name = "dtype" if version("transformers") >= "4.56" else "torch_dtype"
    model = AutoModelForCausalLM.from_pretrained(directory, **{name: dtype}).eval()
    if device.type == "sim":  # accelerate cannot offload from it
        return model.to(device)
    for part in (model.model.embed_tokens, model.model.norm, model.model.rotary_emb, model.lm_head):
        part.to(device)
    for layer in model.model.layers:
        cpu_offload(layer, execution_device=device)
    return model


def seconds(run: Callable[[], Any], device: torch.device) -> float:
    """Return how long a call takes on the device."""
    synchronise = torch.get_device_module(device.type).synchronize
    synchronise(device)
    start = time.perf_counter()
    run()
    synchronise(device)
    return time.perf_counter() - start


def copier_of_a_block(model: Any, device: torch.device) -> tuple[Callable[[], None], int]:
    """Return a function that copies one block's weights to the device, and their bytes."""
    hosts = [parameter.detach() for parameter in model.blocks[0].parameters()]
    there = [torch.empty_like(host, device=device) for host in hosts]

    def copy() -> None:
        for target, host in zip(there, hosts):
            target.copy_(host, non_blocking=True)

    return copy, sum(host.nbytes for host in hosts)


@torch.no_grad()
def measure(arguments: argparse.Namespace, device: torch.device) -> dict[str, float]:
    """Load both, and time them in turns."""
    dtype = getattr(torch, arguments.dtype)
    with tempfile.TemporaryDirectory() as directory:
        make_checkpoint(Path(directory), arguments.size, dtype, device)
        ours = load_ours(Path(directory), dtype, device)
        theirs = load_theirs(Path(directory), dtype, device)
    print(ours.placement)
    shape = (arguments.batch, arguments.ctx)
    tokens = torch.randint(3, ours.cfg.d_vocab, shape).to(device)

    def our_forward() -> torch.Tensor:
        return ours(tokens, prepend_bos=False)

    def their_forward() -> torch.Tensor:
        return theirs(tokens, use_cache=False).logits

    copy_block, block_bytes = copier_of_a_block(ours, device)
    bytes_of_blocks = block_bytes * ours.cfg.n_layers
    agreement = (our_forward().argmax(-1) == their_forward().argmax(-1)).float().mean().item()
    copy_block()  # warms up, as one forward of each model just did
    timed: dict[str, list[float]] = {"ours": [], "accelerate": [], "floor": []}
    for _ in range(arguments.rounds):
        timed["ours"].append(seconds(our_forward, device))
        timed["accelerate"].append(seconds(their_forward, device))
        timed["floor"].append(ours.cfg.n_layers * seconds(copy_block, device))
    results = {f"{name}_s": statistics.median(times) for name, times in timed.items()}
    results["ours_tokens_per_s"] = tokens.numel() / results["ours_s"]
    results["speed_over_accelerate"] = ratio(timed["accelerate"], timed["ours"])
    results["time_over_floor"] = ratio(timed["ours"], timed["floor"])
    results["gb_per_forward"] = bytes_of_blocks / 1e9
    results["copy_gb_per_s"] = bytes_of_blocks / 1e9 / results["floor_s"]
    results["same_top_token"] = agreement
    del theirs
    free = torch.get_device_module(device.type).mem_get_info(device)[0]
    if free > 1.3 * bytes_of_blocks:
        ours.to(device, print_details=False)
        our_forward()
        resident = [seconds(our_forward, device) for _ in range(arguments.rounds)]
        results["resident_s"] = statistics.median(resident)
        longer = max(results["resident_s"], results["floor_s"])
        results["time_over_longer_of_floor_and_resident"] = results["ours_s"] / longer
    return results


def ratio(ones: list[float], others: list[float]) -> float:
    """Return the median of the rounds' ratios."""
    return statistics.median(one / other for one, other in zip(ones, others))


def main() -> None:
    """Measure and print a table; write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", choices=SIZES, default="8B")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--ctx", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", category=DeprecationWarning)

    from tl_devicefix import simulate
    from tl_devicefix.placement.devices import resolve

    simulated = arguments.device.startswith("sim")
    with simulate(1) if simulated else contextlib.nullcontext():
        try:
            device = resolve(arguments.device)
        except ValueError:
            device = torch.device("cpu")
        if device.type == "cpu":
            print(f"There is no {arguments.device} here: this benchmark needs a GPU.")
            return
        results = measure(arguments, device)
    if simulated:
        print("On a simulated device: the times mean nothing.")
    for name, value in results.items():
        print(f"{name:<42}{value:10.4f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()

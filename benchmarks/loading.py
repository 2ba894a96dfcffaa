"""Loading across several devices: a worker for each device, or one component after the other.

    python benchmarks/loading.py [--devices 4] [--bytes-per-second 5e6] [--rounds 3] [--json FILE]

A Llama-shaped bfloat16 checkpoint of 12 blocks is loaded, folded, across simulated devices. Each
copy to a device sleeps in proportion to its bytes, as if the link were slow. Two ways take turns in
one process, so that noise on the machine hits both; medians are shown:

    in turn         one component after the other
    at once         a worker for each device, as `from_pretrained` does it

With `--bytes-per-second 0`, copies take no time, and all that is left is work for the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformer_lens import HookedTransformer
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as hf_logging

import tl_devicefix
from tl_devicefix.hooked_transformer import processing
from tl_devicefix.simulation import Machine

CONFIG = LlamaConfig(
    hidden_size=384, intermediate_size=1056, num_hidden_layers=12, num_attention_heads=8,
    num_key_value_heads=2, vocab_size=1024, tie_word_embeddings=False,
)  # fmt: skip


def taking_time(bytes_per_second: float) -> Any:
    """Replace `Machine.record_transfer`, so that copies between devices take time."""
    record = Machine.record_transfer

    def record_slowly(self: Any, source: Any, target: Any, copy: torch.Tensor) -> None:
        record(self, source, target, copy)
        if source != target and bytes_per_second:
            time.sleep(copy.nbytes / bytes_per_second)

    return mock.patch.object(Machine, "record_transfer", record_slowly)


def one_after_the_other(do: Any, units: Any, devices: Any, done: Any) -> None:
    """Do what `each_on_its_device` does, in one thread."""
    for unit in units:
        do(unit)
        done()


def seconds_to_load(checkpoint: Path, n_devices: int, how: str) -> tuple[float, float]:
    """Return the seconds of a load, and the best possible speed-up: all weights / largest share."""
    workers = one_after_the_other if how == "in turn" else processing.each_on_its_device
    with (
        mock.patch.object(processing, "each_on_its_device", workers),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        begun = time.perf_counter()
        model = HookedTransformer.from_pretrained(
            checkpoint, n_devices=n_devices, dtype=torch.bfloat16
        )
        seconds = time.perf_counter() - begun
    shares = [model.placement.bytes_on(device) for device in model.placement.devices]
    return seconds, sum(shares) / max(shares)


def main() -> None:
    """Measure and print; write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--bytes-per-second", type=float, default=5e6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    logging.disable(logging.WARNING)  # one says that there is no tokenizer
    runs: dict[str, list[float]] = {"in turn": [], "at once": []}
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = Path(directory)
        torch.manual_seed(0)
        LlamaForCausalLM(CONFIG).to(torch.bfloat16).save_pretrained(checkpoint)
        with tl_devicefix.simulate(arguments.devices), taking_time(arguments.bytes_per_second):
            # The first load warms up.
            _, ideal = seconds_to_load(checkpoint, arguments.devices, "at once")
            for _ in range(arguments.rounds):
                for how, times in runs.items():
                    times.append(seconds_to_load(checkpoint, arguments.devices, how)[0])
    medians = {how: statistics.median(times) for how, times in runs.items()}
    print(f"{arguments.devices} devices, {os.cpu_count()} cores, torch {torch.__version__}")
    for how, median in medians.items():
        print(f"{how:<8} {median:6.2f} s   {medians['in turn'] / median:5.2f} x")
    print(f"ideal, limited by the device with the largest share: {ideal:.2f} x")
    if arguments.json:
        arguments.json.write_text(json.dumps(medians, indent=2) + "\n")


if __name__ == "__main__":
    main()

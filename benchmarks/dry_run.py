"""What it takes to dry_run a model across devices that do not exist: seconds, and memory.

    python benchmarks/dry_run.py [--model meta-llama/Llama-3.1-405B] [--n-devices 16]

Each job is run dry in a process of its own, whose imports count. Memory is the peak of what is not
mapped from files; torch itself takes most of it. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

TOKENS = 1024


def forward(model: Any) -> None:
    """Run one sequence of tokens."""
    import torch

    with torch.no_grad():
        model(torch.zeros(1, TOKENS, dtype=torch.long))


def cached(model: Any) -> None:
    """Keep the residual stream after each block, and read it on the first device."""
    import torch

    with torch.no_grad():
        tokens = torch.zeros(1, TOKENS, dtype=torch.long)
        _, cache = model.run_with_cache(tokens, names_filter=lambda name: "resid_post" in name)
    for each in cache.values():
        each.norm()


def gradients(model: Any) -> None:
    """Compute the gradient of every parameter."""
    import torch

    model(torch.zeros(1, TOKENS, dtype=torch.long), return_type="loss").backward()


def generated(model: Any) -> None:
    """Generate eight tokens."""
    import torch

    tokens = torch.zeros(1, TOKENS, dtype=torch.long)
    model.generate(tokens, 8, stop_at_eos=False, do_sample=False, verbose=False)


JOBS: dict[str, Callable[[Any], None]] = {
    each.__name__: each for each in (forward, cached, gradients, generated)
}


class Memory:
    """The peak of this process's memory that is not mapped from files, in bytes."""

    def __init__(self) -> None:
        self.most = 0
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            lines = Path("/proc/self/status").read_text().splitlines()
            held = next(line.split()[1] for line in lines if line.startswith("RssAnon"))
            self.most = max(self.most, int(held) * 1024)
            time.sleep(0.02)


def dry_run(job: str, model: str, n_devices: int) -> None:
    """Run one job dry in this process, and print what it took as JSON."""
    memory = Memory()
    import tl_devicefix

    found = tl_devicefix.dry_run(model, JOBS[job], n_devices, dtype="bfloat16", memory="160GiB")
    if not found.runs:
        raise RuntimeError(found.stopped_at) from found.error
    process = psutil.Process(os.getpid())
    seconds = time.time() - process.create_time()
    print(json.dumps({"seconds": seconds, "cpu": time.process_time(), "memory": memory.most}))


def main() -> None:
    """Run each job dry, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="meta-llama/Llama-3.1-405B")
    parser.add_argument("--n-devices", type=int, default=16)
    parser.add_argument("--job", choices=JOBS, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.job:
        dry_run(chosen.job, chosen.model, chosen.n_devices)
        return
    print(f"{'job':11}{'seconds':>9}{'CPU s':>9}{'memory':>11}")
    for job in JOBS:
        command = [sys.executable, __file__, *sys.argv[1:], "--job", job]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        took = json.loads(said.splitlines()[-1])
        megabytes = f"{took['memory'] / 1e6:.0f} MB"
        print(f"{job:11}{took['seconds']:9.1f}{took['cpu']:9.1f}{megabytes:>11}")


if __name__ == "__main__":
    main()

"""How many GPUs the weights of well-known models need: the table in docs/fit_a_model.md.

python docs/building/gpus.py
"""

from __future__ import annotations

import contextlib
from itertools import count

import tl_devicefix

MODELS = (
    "meta-llama/Llama-3.1-8B",
    "google/gemma-2-27b",
    "Qwen/Qwen2.5-32B",
    "meta-llama/Llama-3.1-70B",
    "Qwen/Qwen2.5-72B",
    "meta-llama/Llama-3.1-405B",
)
GPUS = (24, 40, 80, 140)
"""Memory in GiB; that of an H200 is sold as 141 GB."""
FOR_WEIGHTS = 0.8
"""The share of it that weights may take."""


def main() -> None:
    """Print the table."""
    print("| model | weights |", " | ".join(f"{memory} GiB" for memory in GPUS), "|")
    print("|" + "---|" * (2 + len(GPUS)))
    with tl_devicefix.simulate(64, "1TiB", values=False):
        for name in MODELS:
            needed = [devices(name, memory) for memory in GPUS]
            placement = tl_devicefix.plan(name, n_devices=1, dtype="bfloat16")
            weights = f"{placement.bytes_on(0) / 2**30:.0f} GiB"
            print(f"| {name} | {weights} |", " | ".join(map(str, needed)), "|")


def devices(name: str, memory: int) -> int:
    """The fewest GPUs of that memory which hold the model."""
    for n in count(1):
        limits = dict.fromkeys(range(n), f"{FOR_WEIGHTS * memory}GiB")
        with contextlib.suppress(ValueError):  # that the weights do not fit
            tl_devicefix.plan(name, n_devices=n, dtype="bfloat16", max_memory=limits)
            return n
    raise AssertionError


if __name__ == "__main__":
    main()

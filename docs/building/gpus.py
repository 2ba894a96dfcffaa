"""How many GPUs the weights of well-known models need: the table in docs/fit_a_model.md.

python docs/building/gpus.py
"""

from __future__ import annotations

import contextlib
from math import ceil

import tl_devicefix

MODELS = {
    "Llama 3.1 8B": "meta-llama/Llama-3.1-8B",
    "Gemma 2 27B": "google/gemma-2-27b",
    "Qwen2.5 32B": "Qwen/Qwen2.5-32B",
    "Llama 3.1 70B": "meta-llama/Llama-3.1-70B",
    "Qwen2.5 72B": "Qwen/Qwen2.5-72B",
    "Llama 3.1 405B": "meta-llama/Llama-3.1-405B",
}
GPUS = {"24 GB": 24, "40 GB": 40, "80 GB": 80, "141 GB": 140}
"""A GPU's memory as it is sold -> its memory in GiB."""
FOR_WEIGHTS = 0.8
"""The share of the memory that weights may take."""


def main() -> None:
    """Print the table."""
    print("| model | weights |", " | ".join(GPUS), "|")
    print("|" + "---|" * (2 + len(GPUS)))
    with tl_devicefix.simulate(64, "1TiB", values=False):
        for called, name in MODELS.items():
            placement = tl_devicefix.plan(name, n_devices=1, dtype="bfloat16")
            weights = placement.bytes_on(0) / 2**30
            needed = [devices(name, memory, weights) for memory in GPUS.values()]
            print(f"| {called} | {weights:.0f} GiB |", " | ".join(map(str, needed)), "|")


def devices(name: str, memory: int, weights: float) -> int:
    """Return the fewest GPUs with `memory` GiB that hold a model of `weights` GiB."""
    for n in range(ceil(weights / (FOR_WEIGHTS * memory)), 65):
        limits = dict.fromkeys(range(n), f"{FOR_WEIGHTS * memory}GiB")
        with contextlib.suppress(ValueError):  # the weights do not fit
            tl_devicefix.plan(name, n_devices=n, dtype="bfloat16", max_memory=limits)
            return n
    raise AssertionError


if __name__ == "__main__":
    main()

"""How long a forward on simulated devices takes, compared with one on the CPU.

    python benchmarks/simulate.py [--rounds 30]

Forwards across four simulated devices and on the CPU take turns in one process. The figure is the
median of the ratios of CPU seconds of one thread.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

import tl_devicefix
from tl_devicefix.demo import CHECKPOINT


def seconds(model: Any, tokens: torch.Tensor) -> float:
    """Return the CPU seconds of a forward."""
    start = time.process_time()
    model(tokens)
    return time.process_time() - start


def shipped(n_devices: int, device: str | None) -> Any:
    """Load the model that ships: `d_model` 64."""
    from transformer_lens import HookedTransformer

    with contextlib.redirect_stdout(io.StringIO()):
        return HookedTransformer.from_pretrained(
            str(CHECKPOINT), n_devices=n_devices, device=device
        )


def of_width(d_model: int, n_devices: int, device: str | None) -> Any:
    """Return a random model of eight blocks."""
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    sizes = {"n_layers": 8, "d_model": d_model, "d_head": 64, "n_ctx": 256, "d_vocab": 30}
    cfg = HookedTransformerConfig(**sizes, act_fn="gelu", n_devices=n_devices, device=device)
    return HookedTransformer(cfg)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    torch.set_num_threads(1)

    models: dict[str, Callable[[int, str | None], Any]] = {
        "the model that ships, 11 tokens": shipped,
        "d_model 512, 128 tokens": lambda *where: of_width(512, *where),
        "d_model 1024, 128 tokens": lambda *where: of_width(1024, *where),
    }
    with torch.no_grad(), tl_devicefix.simulate(4):
        for name, load in models.items():
            tokens = torch.randint(3, 30, (1, 11 if load is shipped else 128))
            four, one = load(4, None), load(1, "cpu")
            ratios = [seconds(four, tokens) / seconds(one, tokens) for _ in range(rounds)]
            print(f"{name:<40}{statistics.median(ratios):6.1f}")


if __name__ == "__main__":
    main()

"""What single-device use pays for the patches: forward time and import time, as ratios.

    python benchmarks/overhead.py [--rounds 30] [--json FILE]

Patched and unpatched forwards of one model alternate in one process, so that noise on the machine
hits both. Imports are timed in processes of their own, since a module is imported once.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path

import torch

IMPORTS = """
import time
start = time.perf_counter()
import transformer_lens
alone = time.perf_counter()
import tl_devicefix
both = time.perf_counter()
print(alone - start, both - alone)
"""


def time_forwards(rounds: int, forwards: int = 20) -> tuple[list[float], list[float]]:
    """Seconds per forward, patched and unpatched, for each of `rounds` alternating rounds."""
    from transformer_lens import HookedTransformer

    import tl_devicefix
    from tl_devicefix.demo.demo import CHECKPOINT

    with contextlib.redirect_stdout(io.StringIO()):
        model = HookedTransformer.from_pretrained(str(CHECKPOINT), device="cpu")
    tokens = torch.randint(0, model.cfg.d_vocab, (4, 32))

    def seconds_per_forward() -> float:
        start = time.perf_counter()
        for _ in range(forwards):
            model(tokens)
        return (time.perf_counter() - start) / forwards

    patched, unpatched = [], []
    with torch.no_grad():
        seconds_per_forward()  # warm up
        for _ in range(rounds):
            patched.append(seconds_per_forward())
            with tl_devicefix.disabled():
                unpatched.append(seconds_per_forward())
    return patched, unpatched


def time_imports(processes: int = 5) -> tuple[float, float]:
    """Median seconds to import TransformerLens, and then this package on top of it."""
    runs = []
    for _ in range(processes):
        result = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", IMPORTS],
            capture_output=True,
            text=True,
            check=True,
        )
        runs.append([float(seconds) for seconds in result.stdout.split()[-2:]])
    return statistics.median(r[0] for r in runs), statistics.median(r[1] for r in runs)


def main() -> None:
    """Measure and print a table; write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", category=DeprecationWarning)

    patched, unpatched = time_forwards(arguments.rounds)
    alone, added = time_imports()
    results = {
        "forward_patched_ms": 1000 * statistics.median(patched),
        "forward_unpatched_ms": 1000 * statistics.median(unpatched),
        "forward_ratio": statistics.median(p / u for p, u in zip(patched, unpatched)),
        "import_transformer_lens_s": alone,
        "import_tl_devicefix_s": added,
        "import_ratio": (alone + added) / alone,
    }
    for name, value in results.items():
        print(f"{name:<28}{value:8.3f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()

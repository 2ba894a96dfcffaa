"""How long importing TransformerLens and this package takes, compared with TransformerLens alone.

    python benchmarks/importing.py [--processes 5]

Each measurement is a new process, since Python imports a module once.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys

IMPORTS = """
import time
start = time.perf_counter()
import transformer_lens
alone = time.perf_counter()
import tl_devicefix
both = time.perf_counter()
print(alone - start, both - alone)
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=5)
    command = [sys.executable, "-W", "ignore", "-c", IMPORTS]
    runs = []
    for _ in range(parser.parse_args().processes):
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        runs.append([float(seconds) for seconds in result.stdout.split()[-2:]])
    alone, added = (statistics.median(column) for column in zip(*runs))
    print(
        f"TransformerLens {alone:.2f} s, tl_devicefix {added:.2f} s more: {1 + added / alone:.2f}"
    )


if __name__ == "__main__":
    main()

"""Run cases of the random trial: `python tests/fuzz 2000`, or `python tests/fuzz 1 --seed 17`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from cases import Installed, report  # noqa: E402


def main() -> None:
    """Print the cases that differ, each as short as it is found to be."""
    import tl_devicefix

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", type=int, nargs="?", default=2000)
    parser.add_argument("--seed", type=int, default=0, help="of the first case; the next has + 1")
    arguments = parser.parse_args()
    seeds = range(arguments.seed, arguments.seed + arguments.cases)
    print(f"seeds {seeds[0]} to {seeds[-1]}, with {tl_devicefix.__file__}", flush=True)
    start, failed = time.time(), []
    with Installed() as installed:
        for seed in seeds:
            found = report(seed, installed)
            if found is not None:
                print(found, flush=True)
                failed.append(seed)
    print(f"{len(failed)} of {len(seeds)} cases differ, {time.time() - start:.0f} s: {failed}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()

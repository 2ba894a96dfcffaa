"""What is left of a harvest of which a rank is killed."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import a_harvest
import pytest
from ranks import free_port
from written_by_hand import files

import tl_devicefix
from tl_devicefix import load_activations, save_activations
from tl_devicefix.demo.demo import load_checkpoint


@pytest.fixture
def two_ranks(tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Two processes that harvest to a directory without end."""
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, a_harvest.__file__, str(tmp_path / "out")],
            env={**os.environ, **master, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(2)
    ]
    yield ranks
    for each in ranks:
        each.kill()
        each.wait()


def n_shards(directory: Path) -> int:
    return len(list(directory.glob("shard-*.safetensors")))


@pytest.mark.full(reason="it starts processes; by default, one that is killed in a forward")
def test_a_rank_that_is_killed(two_ranks: list[subprocess.Popen[str]], tmp_path: Path) -> None:
    """What is there is whole, and one process goes on to the same bytes."""
    until = time.monotonic() + 120
    while n_shards(tmp_path / "out") < 3 and time.monotonic() < until:
        time.sleep(0.01)
    two_ranks[1].send_signal(signal.SIGKILL)
    said, _ = two_ranks[0].communicate(timeout=30)
    assert "HostLost: rank 1 (" in said
    there = load_activations(tmp_path / "out")
    assert len(there.index.shards) >= 3
    assert there.verify() == []

    batches = list(itertools.islice(a_harvest.batches(), len(there)))
    options: dict[str, Any] = {
        "names_filter": a_harvest.NAMES,
        "shard_size": "64KiB",
        "progress": False,
    }
    with tl_devicefix.simulate(2):
        model = load_checkpoint(2)
        save_activations(model, batches, directory=tmp_path / "out", resume=True, **options)
        save_activations(model, batches, directory=tmp_path / "whole", **options)
    assert files(tmp_path / "out") == files(tmp_path / "whole")

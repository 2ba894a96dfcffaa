"""Simulated devices that are those of other processes: `pytest --ranks 2`."""

from __future__ import annotations

import dataclasses
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tl_devicefix
from tl_devicefix.hosts.joining import Ranks, meet
from tl_devicefix.simulation import simulate
from tl_devicefix.simulation.machine import Machine
from tl_devicefix.simulation.session import _capacities


def lend_to_this_process(world_size: int) -> Ranks:
    """Start processes that lend their devices to this one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        master = f"127.0.0.1:{free.getsockname()[1]}"
    for rank in range(1, world_size):
        arguments = ["lend", "--master", master, "--rank", str(rank)]
        arguments += ["--world-size", str(world_size)]
        subprocess.Popen([sys.executable, "-m", "tl_devicefix", *arguments])
    return meet(master, 0, world_size)


def simulate_with(ranks: Ranks) -> Any:
    """What stands for `tl_devicefix.simulate`: devices of all ranks in turn."""
    world_size = len(ranks.peers) + 1

    @contextmanager
    def simulated(
        n_devices: int, memory: Any = "80GiB", values: bool = True, **options: Any
    ) -> Iterator[Machine]:
        if not values or options.get("asynchronous"):
            with simulate(n_devices, memory, values=values, **options) as machine:
                yield machine
            return
        there = {each.rank: each for each in ranks.places}
        places = [
            dataclasses.replace(there[index * world_size // n_devices], memory=nbytes)
            for index, nbytes in enumerate(_capacities(n_devices, memory))
        ]
        with ranks.entered(places) as machine:
            yield machine

    return simulated


def run_on_ranks(world_size: int) -> None:
    tl_devicefix.simulate = simulate_with(lend_to_this_process(world_size))

"""Devices of other processes, as simulated ones: for `tests/multihost`, and `pytest --ranks 2`."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import re
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

import tl_devicefix
from tl_devicefix.multihost import commands
from tl_devicefix.multihost.handshake import Place, called, hello
from tl_devicefix.multihost.init_hosts import Ranks, meet
from tl_devicefix.multihost.rpc_worker import Worker
from tl_devicefix.multihost.signing import signer
from tl_devicefix.multihost.transport import Connection, Transport
from tl_devicefix.placement.memory import bytes_of
from tl_devicefix.simulation import simulate
from tl_devicefix.simulation.machine import Machine

# That of all processes that tests start: none is made in the user's home.
os.environ["TL_DEVICEFIX_TOKEN"] = secrets.token_hex(32)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def lend_to_this_process(world_size: int) -> Ranks:
    """Start processes that lend their devices to this one, until it ends."""
    master = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "tl_devicefix", "worker", "--master", master]
    for rank in range(1, world_size):
        options = ["--rank", str(rank), "--world-size", str(world_size)]
        subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL)
    return meet(master, 0, world_size)


def lend_from_a_thread() -> Ranks:
    """Start a thread of this process that lends a device to it, until it ends."""
    hellos = [hello([]) | {"devices": [("cpu", 8 << 30)]} for _ in range(2)]
    by, ways = signer().of_session(hellos), ("0 1", "1 0")
    first, second = map(Connection, socket.socketpair(), [by] * 2, ways, ways[::-1])
    transport = Transport({0: second}, {})
    worker: Any = Worker(called(hellos, 1), [torch.device("cpu")], transport)
    # The one setting that is a thread's own: all others are rank 0's already, or again.
    is_flushed = [get for get, _ in commands._SETTINGS].index(commands._flushes_denormals)
    worker._settings = lambda values: torch.set_flush_denormal(values[is_flushed])

    def lend() -> None:
        with contextlib.closing(transport):
            worker.lend()

    thread = threading.Thread(target=lend, daemon=True, name="rank 1")
    thread.start()
    # Once the ranks have left: Python ends the process if a thread comes back from torch too late.
    atexit.register(thread.join, 10)
    return Ranks(hellos, Transport({1: first}, {}), None)


def devices_of(ranks: Ranks, memory: Sequence[int | str]) -> list[Place]:
    """As many devices as there are sizes, the first of rank 0, the last of the last rank."""
    one_each = {place.rank: place for place in ranks.places}
    return [
        dataclasses.replace(one_each[index * len(one_each) // len(memory)], memory=bytes_of(size))
        for index, size in enumerate(memory)
    ]


def without_hosts(text: str) -> str:
    """What is said of devices where there is one host: "sim:1", not "sim:1 (host1/cpu:0)"."""
    return re.sub(r" \(host\d+/cpu:\d+\)", "", re.sub(r"\(host\d+/cpu:\d+, ", "(", text))


def run_on_ranks(world_size: int) -> None:
    """Have `tl_devicefix.simulate` give devices of several processes, but where it may not."""
    ranks = lend_to_this_process(world_size)

    @contextmanager
    def simulated(
        n_devices: int, memory: Any = "80GiB", values: bool = True, **options: Any
    ) -> Iterator[Machine]:
        if not values or options.get("asynchronous") or "hosts" in options:
            with simulate(n_devices, memory, values=values, **options) as machine:
                yield machine
            return
        sizes = [memory] * n_devices if isinstance(memory, int | str) else memory
        with ranks.entered(devices_of(ranks, sizes)) as machine:
            yield machine

    tl_devicefix.simulate = simulated

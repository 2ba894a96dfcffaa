"""How ranks find each other: `join`, after which the script runs on rank 0 alone."""

from __future__ import annotations

import atexit
import ctypes
import functools
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from typing import Any, NoReturn

import psutil
import torch
import torch.distributed as dist

from tl_devicefix.hosts.far_devices import FarDevices, Place, sites_of
from tl_devicefix.hosts.lending import Lender
from tl_devicefix.hosts.peers import Peer, RankLost, Wire, said_by_gloo
from tl_devicefix.hosts.watching import MEETING, Watch
from tl_devicefix.simulation.backend import real_accelerator
from tl_devicefix.simulation.machine import Machine, bytes_of
from tl_devicefix.simulation.session import entered

_joined: Machine | None = None
_for_good = ExitStack()


def join(
    master: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    *,
    n_devices: int | None = None,
    memory: int | str | None = None,
    timeout: float = 15.0,
) -> None:
    """Have the devices of all ranks in this process, if it is rank 0; lend them to it otherwise.

    On rank 0 it returns, and the script goes on with the devices of all ranks. On any other rank it
    does not: the process lends its devices until rank 0 ends, and ends then. Without a launcher
    (torchrun, srun, or anything that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT) it does
    nothing.

    Args:
        master: where rank 0 listens, "host:port"; by default as the launcher says.
        rank: which one this is; by default as the launcher says.
        world_size: how many ranks there are; by default as the launcher says.
        n_devices: how many devices this rank has; by default all that torch sees, or the CPU.
            On the CPU there may be several.
        memory: what each of them may hold; by default what is free.
        timeout: seconds without a sign of life after which a rank is given up.

    Raises:
        RuntimeError: if ranks have other versions of torch, TransformerLens or this package, or one
            does not come within 10 minutes.
        ValueError: if there are not so many devices, or a launcher has not said where ranks meet.
    """
    global _joined
    world_size = int(os.environ.get("WORLD_SIZE", 1)) if world_size is None else world_size
    if _joined is not None or world_size < 2:
        return
    if master is None:
        master = f"{_launched('MASTER_ADDR')}:{_launched('MASTER_PORT')}"
    rank = int(_launched("RANK")) if rank is None else rank
    ranks = meet(master, rank, world_size, n_devices, memory, timeout)
    _joined = _for_good.enter_context(ranks.entered())


def _launched(name: str) -> str:
    """What a launcher says."""
    if name not in os.environ:
        raise ValueError(
            f"WORLD_SIZE is {os.environ.get('WORLD_SIZE')}, but {name} is not set: launch with "
            'torchrun, set it, or give join(master="host:port", rank=..., world_size=...)'
        )
    return os.environ[name]


class Ranks:
    """All ranks, as rank 0 knows them.

    Args:
        everyone: what each said of itself.
        watch: over the others.

    Attributes:
        places: where their devices are.
        peers: the other ones.
    """

    def __init__(self, everyone: list[dict[str, Any]], watch: Watch) -> None:
        self.places = _places(everyone)
        others = range(1, len(everyone))
        self.peers = {
            each: Peer(each, watch.store, functools.partial(self.lose, each)) for each in others
        }
        self._everyone, self._watch = everyone, watch
        watch.begin(list(others), self.lose)
        atexit.register(self._leave)

    @contextmanager
    def entered(self, places: list[Place] | None = None) -> Iterator[Machine]:
        """Have their devices, or those of these places."""
        far = FarDevices(places or self.places, self.peers)
        memory = [place.memory for place in far.places]
        with entered(memory, far, sites_of(far.places)) as machine:
            yield machine

    def lose(self, rank: int, why: str) -> None:
        """Give up: whoever waits for any rank is told which one is lost, and all others end."""
        host = self._everyone[rank]["host"]
        devices = ", ".join(name for name, _ in self._everyone[rank]["devices"])
        error = RankLost(f"rank {rank} ({host}, {devices}) is lost: {why}", rank)
        self._watch.tell_all(str(error))
        for peer in self.peers.values():
            peer.lose(error)

    def _leave(self) -> None:
        self._watch.end()
        for peer in self.peers.values():
            peer.end()
        for peer in self.peers.values():
            peer.rest()


def meet(
    master: str,
    rank: int,
    world_size: int,
    n_devices: int | None = None,
    memory: int | str | None = None,
    timeout: float = 15.0,
) -> Ranks:
    """Wait for all ranks. On rank 0 it returns; on the others, the process lends its devices."""
    devices = _own_devices(n_devices)
    try:
        watch = Watch(master, rank, world_size, timeout)
        watch.meet(world_size)
    except RuntimeError as error:  # DistError is one
        raise RuntimeError(
            f"not all {world_size} ranks came to {master}: start each of them, with a rank of its "
            "own, and see that this port can be reached"
        ) from error
    _choose_interface(master)
    dist.init_process_group(
        "gloo", store=watch.store, rank=rank, world_size=world_size, timeout=MEETING
    )
    hello: dict[str, Any] = {
        "host": socket.gethostname(),
        "devices": [(str(each), _free(each, memory)) for each in devices],
        "versions": {name: version(name) for name in ("torch", "transformer_lens", "tl_devicefix")},
    }
    _keep_until_the_process_ends()
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, hello)
    _check_versions(everyone)
    if not rank:
        return Ranks(everyone, watch)
    _lend(rank, hello["host"], devices, watch)


def _choose_interface(master: str) -> None:
    """Have gloo use the network by which rank 0 is reached; by itself, it asks for the hostname."""
    address, _, port = master.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            asked.connect((address, int(port)))  # sends nothing
        except OSError:  # no IPv4
            return
        own = asked.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == own for each in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _keep_until_the_process_ends() -> None:
    """Keep gloo from being taken down by Python, with which threads that wait abort."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(dist.group.WORLD))


def _lend(rank: int, host: str, devices: list[torch.device], watch: Watch) -> NoReturn:
    """Lend devices until rank 0 ends, and end then: with 1 if that was no good end."""

    def lose(_: int, why: str) -> None:
        print(f"rank {rank} ({host}) ends, as rank 0 is lost: {why}", file=sys.stderr)
        _end(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, for rank 0 to decide
    watch.begin([0], lose)
    try:
        Lender(
            f"rank {rank} ({host})", devices, Wire(rank, watch.store, functools.partial(lose, 0))
        ).lend()
    except RuntimeError as error:  # gloo's
        watch.end()
        lose(0, said_by_gloo(error))
    watch.end()
    _end(0)


def _end(status: int) -> NoReturn:
    """End the process, whatever its other threads wait for."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _own_devices(n_devices: int | None) -> list[torch.device]:
    accelerator = real_accelerator()
    if accelerator is None:
        return [torch.device("cpu")] * (n_devices or 1)
    there = torch.get_device_module(accelerator.type).device_count()
    if (n_devices or there) > there:
        raise ValueError(
            f"n_devices={n_devices}, but this rank has {there} device(s) of type "
            f"{accelerator.type!r}: ask for fewer"
        )
    return [torch.device(accelerator.type, index) for index in range(n_devices or there)]


def _free(device: torch.device, memory: int | str | None) -> int:
    if memory is not None:
        return bytes_of(memory)
    if device.type == "cpu":
        return int(psutil.virtual_memory().available)
    return int(torch.get_device_module(device.type).mem_get_info(device)[0])


def _check_versions(everyone: list[Any]) -> None:
    for rank, each in enumerate(everyone):
        for name, found in each["versions"].items():
            expected = everyone[0]["versions"][name]
            if found != expected:
                raise RuntimeError(
                    f"rank {rank} ({each['host']}) has {name} {found}, and rank 0 "
                    f"({everyone[0]['host']}) has {expected}: install the same on both"
                )


def _places(everyone: list[Any]) -> list[Place]:
    hosts = [each["host"] for each in everyone]
    names = [host if hosts.count(host) == 1 else f"host{rank}" for rank, host in enumerate(hosts)]
    return [
        Place(rank, number, torch.device(device), names[rank], memory)
        for rank, each in enumerate(everyone)
        for number, (device, memory) in enumerate(each["devices"])
    ]

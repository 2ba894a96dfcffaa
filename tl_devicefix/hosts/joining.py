"""How ranks find each other: `join`, after which the script runs on rank 0 alone."""

from __future__ import annotations

import atexit
import logging
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist

from tl_devicefix.hosts.far_devices import FarDevices, Place
from tl_devicefix.hosts.lending import Lender
from tl_devicefix.hosts.peers import Peer, Wire
from tl_devicefix.hosts.watching import Watch
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
        rank: which one this is; by default as the launcher says, or 0.
        world_size: how many ranks there are; by default as the launcher says.
        n_devices: how many devices this rank has; by default all that torch sees, or the CPU.
            On the CPU there may be several.
        memory: what each of them may hold; by default what is free.
        timeout: seconds without a sign of life after which a rank is given up.

    Raises:
        RuntimeError: if ranks have other versions of torch, TransformerLens or this package.
        ValueError: if there are not so many devices.
    """
    global _joined
    world_size = int(os.environ.get("WORLD_SIZE", 1)) if world_size is None else world_size
    if _joined is not None or world_size < 2:
        return
    if master is None:
        master = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    rank = int(os.environ.get("RANK", 0)) if rank is None else rank
    ranks = meet(master, rank, world_size, n_devices, memory, timeout)
    _joined = _for_good.enter_context(ranks.entered())


@dataclass
class Ranks:
    """All ranks, as rank 0 knows them.

    Attributes:
        places: where their devices are.
        peers: the other ones.
    """

    places: list[Place]
    peers: dict[int, Peer]

    @contextmanager
    def entered(self, places: list[Place] | None = None) -> Iterator[Machine]:
        """Have their devices, or as many as places are given."""
        far = FarDevices(places or self.places, self.peers)
        with entered([place.memory for place in far.places], far) as machine:
            yield machine


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
    watch = Watch(master, rank, world_size, timeout)
    dist.init_process_group(
        "gloo", store=watch.store, rank=rank, world_size=world_size, timeout=timedelta(days=365)
    )
    hello = {
        "host": socket.gethostname(),
        "devices": [(str(each), _free(each, memory)) for each in devices],
        "versions": {
            name: version(name) for name in ("torch", "transformer_lens", "tl_devicefix")
        },
    }
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, hello)
    _check_versions(everyone)
    if rank:
        watch.begin({0: None})
        _lend(f"rank {rank} ({hello['host']})", devices)
        watch.end()
        os._exit(0)
    peers = {each: Peer(each) for each in range(1, world_size)}
    watch.begin(peers)
    atexit.register(_leave, peers, watch)
    return Ranks(_places(everyone), peers)


def _lend(name: str, devices: list[torch.device]) -> None:
    Lender(name, devices, Wire()).lend()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()


def _leave(peers: dict[int, Peer], watch: Watch) -> None:
    watch.end()
    for peer in peers.values():
        peer.end()


def _own_devices(n_devices: int | None) -> list[torch.device]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return [torch.device("cpu")] * (n_devices or 1)
    there = torch.accelerator.device_count()
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
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
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
    return [
        Place(rank, number, torch.device(device), f"host{rank}/{device}", memory)
        for rank, each in enumerate(everyone)
        for number, (device, memory) in enumerate(each["devices"])
    ]

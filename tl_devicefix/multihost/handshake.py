"""What ranks say of themselves when they meet, and what each is called from then on."""

from __future__ import annotations

import secrets
import socket
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import torch

from tl_devicefix.multihost.classes import PACKAGES
from tl_devicefix.multihost.far_devices import Place, sites_of
from tl_devicefix.multihost.sharing import machine
from tl_devicefix.simulation.machine import bytes_of


def hello(
    sees: Sequence[tuple[str, str]],
    n_devices: int | None = None,
    memory: int | str | None = None,
    timeout: float = 15.0,
) -> dict[str, Any]:
    """What a rank says, as JSON has it: its host, what it sees and asks for, and its versions.

    Args:
        sees: devices, and by what all ranks know each.
        n_devices: how many of them it is to have; None for its part.
        memory: what each may hold; None for what is free.
        timeout: seconds within which it is known that a rank is lost.
    """
    return {
        "host": socket.gethostname(),
        "machine": machine(),
        "sees": list(sees),
        "n_devices": n_devices,
        "memory": None if memory is None else bytes_of(memory),
        "timeout": timeout,
        "session": secrets.token_hex(16),
        "versions": {name: version(name) for name in PACKAGES} | {"Python": _python()},
    }


def _python() -> str:
    """Its version, within which classes are pickled alike: "3.12"."""
    return "{}.{}".format(*sys.version_info)


def other_versions(everyone: Sequence[Any]) -> str | None:
    """What is wrong if not all have the same versions."""
    for rank, each in enumerate(everyone):
        for name, expected in everyone[0]["versions"].items():
            found = each["versions"].get(name)
            if found != expected:
                return (
                    f"rank {rank} ({each['host']}) has {name} {found}, and rank 0 "
                    f"({everyone[0]['host']}) has {expected}: install the same on both"
                )
    return None


def places(everyone: Sequence[Any]) -> list[Place]:
    """Where all devices are. A host that several ranks have is called by its rank.

    That is "host1", or "rank1" where another host is really called "host1", or "rank 1".
    """
    hosts = [each["host"] for each in everyone]
    own = {host for host in hosts if hosts.count(host) == 1}
    by_rank = (
        next(name for name in (f"host{n}", f"rank{n}", f"rank {n}") if name not in own)
        for n in range(len(hosts))
    )
    names = [host if host in own else number for host, number in zip(hosts, by_rank)]
    return [
        Place(rank, number, torch.device(device), names[rank], memory)
        for rank, each in enumerate(everyone)
        for number, (device, memory) in enumerate(each["devices"])
    ]


def called(everyone: Sequence[Any], rank: int) -> str:
    """A rank as errors name it: "rank 1 (node-b/cuda:0 to cuda:7)", "rank 1 (host1/cpu:0, on vm)".

    Devices are called as in a placement; where that says no host, the host comes behind.
    """
    host = everyone[rank]["host"]
    first, *others = [each for each in sites_of(places(everyone)) if each.host == rank]
    devices = first.name + (f" to {others[-1].device}" if others else "")
    return f"rank {rank} ({devices}{'' if first.hostname == host else f', on {host}'})"


def lending(everyone: Sequence[Any], rank: int) -> str:
    """What a rank lends, and to whom, in a sentence."""
    memory = [each.memory for each in places(everyone) if each.rank == rank]
    devices = "its device" if len(memory) == 1 else f"its {len(memory)} devices"
    return (
        f"{called(everyone, rank)} lends {devices}, with {sum(memory) / 2**30:.2f} GiB, to "
        f"{called(everyone, 0)} until that ends"
    )

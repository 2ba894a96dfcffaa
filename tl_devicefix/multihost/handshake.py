"""What ranks say of themselves as they meet, which devices each has, and what these are called."""

from __future__ import annotations

import secrets
import socket
import sys
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch

from tl_devicefix.monkeypatch.exchanged import PACKAGES
from tl_devicefix.placement.devices import Site
from tl_devicefix.placement.memory import bytes_of
from tl_devicefix.simulation.backend import real_accelerator


@dataclass(frozen=True)
class Place:
    """Where a device is.

    Attributes:
        rank: of whom it is.
        number: index among the rank's own devices.
        device: as that rank names it.
        hostname: of the rank's host; "host1" or "rank1" if that is not its alone.
        memory: bytes that the rank reports as free.
    """

    rank: int
    number: int
    device: torch.device
    hostname: str
    memory: int


def sites_of(places: Sequence[Place]) -> list[Site]:
    """Of which host each device is, and what it is called there; ranks are hosts."""
    of_rank: Counter[int] = Counter()
    sites = []
    for position, place in enumerate(places):
        number = of_rank[place.rank]
        of_rank[place.rank] += 1
        kind, index = place.device.type, place.device.index
        device = f"{kind}:{number if index is None else index}"
        sites.append(Site(position, place.rank, place.hostname, number, device))
    return sites


def hello(
    sees: Sequence[tuple[str, str]],
    n_devices: int | None = None,
    memory: int | str | None = None,
    timeout: float = 15.0,
) -> dict[str, Any]:
    """What a rank says, as JSON has it: its host, what it sees and asks for, and its versions."""
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


def other_versions(hellos: Sequence[Any]) -> str | None:
    """What is wrong if not all have the same versions."""
    for rank, greeting in enumerate(hellos):
        for name, expected in hellos[0]["versions"].items():
            installed = greeting["versions"].get(name)
            if installed != expected:
                return (
                    f"rank {rank} ({greeting['host']}) has {name} {installed}, and rank 0 "
                    f"({hellos[0]['host']}) has {expected}: install the same on both"
                )
    return None


def places(hellos: Sequence[Any]) -> list[Place]:
    """Where all devices are. A host that several ranks have is called by its rank.

    That is "host1", or "rank1" where another host is really called "host1", or "rank 1".
    """
    hosts = [greeting["host"] for greeting in hellos]
    own = {host for host in hosts if hosts.count(host) == 1}
    by_rank = (
        next(name for name in (f"host{n}", f"rank{n}", f"rank {n}") if name not in own)
        for n in range(len(hosts))
    )
    names = [host if host in own else number for host, number in zip(hosts, by_rank)]
    return [
        Place(rank, number, torch.device(device), names[rank], memory)
        for rank, greeting in enumerate(hellos)
        for number, (device, memory) in enumerate(greeting["devices"])
    ]


def called(hellos: Sequence[Any], rank: int) -> str:
    """A rank as errors name it: "rank 1 (node-b/cuda:0 to cuda:7)", "rank 1 (host1/cpu:0, on vm)".

    Devices are called as in a placement; where that says no host, the host comes behind.
    """
    host = hellos[rank]["host"]
    first, *others = [site for site in sites_of(places(hellos)) if site.host == rank]
    devices = first.name + (f" to {others[-1].device}" if others else "")
    return f"rank {rank} ({devices}{'' if first.hostname == host else f', on {host}'})"


def lending(hellos: Sequence[Any], rank: int) -> str:
    """What a rank lends, and to whom, in a sentence."""
    memory = [place.memory for place in places(hellos) if place.rank == rank]
    devices = "its device" if len(memory) == 1 else f"its {len(memory)} devices"
    return (
        f"{called(hellos, rank)} lends {devices}, with {sum(memory) / 2**30:.2f} GiB, to "
        f"{called(hellos, 0)} until that ends"
    )


_BOOT = Path("/proc/sys/kernel/random/boot_id")


def visible_devices(n_devices: int | None) -> list[tuple[str, str]]:
    """The devices that this process sees, and by what all processes know each."""
    if n_devices is not None and n_devices < 1:
        raise ValueError(f"n_devices={n_devices}: each rank has one or more")
    accelerator = real_accelerator()
    if accelerator is None:  # another process's CPU device is another one
        return [("cpu", uuid.uuid4().hex) for _ in range(n_devices or 1)]
    of_type = torch.get_device_module(accelerator.type)
    devices = [torch.device(accelerator.type, index) for index in range(of_type.device_count())]
    if (n_devices or 0) > len(devices):
        raise ValueError(
            f"n_devices={n_devices}, but this rank has {len(devices)} device(s) of type "
            f"{accelerator.type!r}: ask for fewer"
        )
    return [(str(device), _id_of(device)) for device in devices]


_TELLING = ("uuid", "pci_domain_id", "pci_bus_id", "pci_device_id")
"""Properties that tell devices apart: some of AMD have no UUID, and parts of one the same place."""


def _id_of(device: torch.device) -> str:
    of_type = torch.get_device_module(device.type)
    has_properties = hasattr(of_type, "get_device_properties")  # MPS has none
    properties = of_type.get_device_properties(device) if has_properties else None
    ids = [str(getattr(properties, name)) for name in _TELLING if hasattr(properties, name)]
    return " ".join([machine(), *(ids or [str(device)])])


def machine() -> str:
    """What processes with the same memory have in common, whatever their hosts are called."""
    return _BOOT.read_text().strip() if _BOOT.exists() else f"{uuid.getnode():x}"


def shared(hellos: Sequence[Any]) -> list[list[str]]:
    """Share devices among ranks that see the same ones: equal parts, in order."""
    groups: dict[frozenset[str], list[int]] = {}
    for rank, greeting in enumerate(hellos):
        device_ids = frozenset(device_id for _, device_id in greeting["sees"])
        groups.setdefault(device_ids, []).append(rank)
    ids: dict[int, list[str]] = {}
    for ranks in groups.values():
        ids |= _parts(hellos, ranks)
    for rank in ids:
        _raise_if_another_has(hellos, ids, rank)
    names = [{device_id: name for name, device_id in greeting["sees"]} for greeting in hellos]
    return [[names[rank][device_id] for device_id in ids[rank]] for rank in range(len(hellos))]


def _parts(hellos: Sequence[Any], ranks: list[int]) -> dict[int, list[str]]:
    """The devices of ranks that see the same ones."""
    left, parts = [device_id for _, device_id in hellos[ranks[0]]["sees"]], {}
    asking = [rank for rank in ranks if hellos[rank]["n_devices"]]
    for rank in asking:
        n_asked = hellos[rank]["n_devices"]
        if n_asked > len(left):
            raise ValueError(
                f"n_devices={n_asked}, but of the devices of rank {rank}'s host "
                f"({hellos[rank]['host']}) other ranks leave {len(left)}: ask for fewer"
            )
        parts[rank], left = left[:n_asked], left[n_asked:]
    others = [rank for rank in ranks if rank not in asking]
    if len(others) > len(left):
        n_there = len(hellos[ranks[0]]["sees"])
        raise ValueError(
            f"{len(ranks)} ranks are on {hellos[ranks[0]]['host']}, which has too few devices, "
            f"{n_there}, for each to have {'what it asks for, or ' if asking else ''}one: start "
            "fewer there"
        )
    for number, rank in enumerate(others):
        first, end = (len(left) * part // len(others) for part in (number, number + 1))
        parts[rank] = left[first:end]
    return parts


def _raise_if_another_has(hellos: Sequence[Any], ids: dict[int, list[str]], rank: int) -> None:
    for name, device_id in hellos[rank]["sees"]:
        for other in range(rank):
            if device_id in ids[rank] and device_id in ids[other]:
                raise ValueError(
                    f"ranks {other} and {rank} ({hellos[rank]['host']}) both have the device "
                    f"that rank {rank} calls {name}, but not the same others: let each see devices "
                    "of its own, or both the same"
                )


def free_memory(devices: Sequence[torch.device], hellos: Sequence[Any], rank: int) -> list[int]:
    """Bytes that each of a rank's devices may hold: as it said, or what is free.

    CPU devices of one machine have equal parts of that, whatever rank they are of.
    """
    own = hellos[rank]
    if own["memory"] is not None:
        return [own["memory"]] * len(devices)
    n_sharing = sum(
        name == "cpu"
        for greeting in hellos
        if greeting["machine"] == own["machine"] and greeting["memory"] is None
        for name, _ in greeting["sees"]
    )
    return [
        int(psutil.virtual_memory().available) // n_sharing
        if device.type == "cpu"
        else int(torch.get_device_module(device.type).mem_get_info(device)[0])
        for device in devices
    ]

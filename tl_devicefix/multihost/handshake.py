"""What ranks say of themselves as they meet, which devices each has, and what these are called."""

from __future__ import annotations

import secrets
import socket
import sys
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from tl_devicefix.monkeypatch.exchanged import PACKAGES
from tl_devicefix.monkeypatch.versions import versions
from tl_devicefix.placement.devices import Site
from tl_devicefix.placement.in_use import placements_in_use
from tl_devicefix.placement.memory import bytes_of
from tl_devicefix.placement.placement import in_short
from tl_devicefix.simulation.backend import real_accelerator


@dataclass(frozen=True)
class Place:
    """Where a device is.

    Attributes:
        rank: of whom it is.
        number: index among the rank's own devices.
        device: as that rank names it.
        hostname: of the rank's host; "host1" if two ranks are on one host.
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
        # Within one of Python as "3.12", classes are pickled alike.
        "versions": {
            **versions(PACKAGES),
            "Python": "{}.{}".format(*sys.version_info),
        },
    }


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
    """Where all devices are. If two ranks are on one host, hosts are called "host0", "host1"."""
    names = [greeting["host"] for greeting in hellos]
    if len(set(names)) < len(names):
        names = [f"host{rank}" for rank in range(len(names))]
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


def parts_of(rank: int) -> str:
    """What a rank holds of models, in short; "" if that is nothing."""
    held = []
    for placement in placements_in_use():
        hosts = {site.torch_device: site.host for site in placement.sites}
        held.append([item.name for item in placement.components if hosts.get(item.device) == rank])
    return " and ".join(dict.fromkeys(in_short(names) for names in held if names))


def held_by(rank: int) -> str:
    """What a rank holds, as a clause behind its name; "" if that is nothing."""
    parts = parts_of(rank)
    return f", which holds {parts}," if parts else ""


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
        raise ValueError(f"n_devices must be 1 or more, but is {n_devices}")
    accelerator = real_accelerator()
    if accelerator is None:  # another process's CPU device is another one
        return [("cpu", uuid.uuid4().hex) for _ in range(n_devices or 1)]
    of_type = torch.get_device_module(accelerator.type)
    devices = [torch.device(accelerator.type, index) for index in range(of_type.device_count())]
    if (n_devices or 0) > len(devices):
        raise ValueError(
            f"n_devices must be {len(devices)} or less, as this rank has no more devices of type "
            f"{accelerator.type!r}, but is {n_devices}"
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
    """Share devices among ranks that see the same ones: equal parts, in order.

    Returns:
        Of each rank the devices that it has, as it calls them.

    Raises:
        ValueError: if a rank would have none, or fewer than it asks for, or another one's.
    """
    groups: dict[frozenset[str], list[int]] = {}
    for rank, greeting in enumerate(hellos):
        device_ids = frozenset(device_id for _, device_id in greeting["sees"])
        groups.setdefault(device_ids, []).append(rank)
    owners: dict[str, int] = {}
    devices: dict[int, list[str]] = {}
    for ranks in groups.values():
        ids = [device_id for _, device_id in hellos[ranks[0]]["sees"]]
        for number, rank in enumerate(ranks):
            greeting, n_asked = hellos[rank], hellos[rank]["n_devices"]
            names = {device_id: name for name, device_id in greeting["sees"]}
            first, end = (len(ids) * part // len(ranks) for part in (number, number + 1))
            part = ids[first:end][:n_asked]
            if len(part) < (n_asked or 1):
                raise ValueError(
                    f"{len(ranks)} ranks share the {len(ids)} devices of {greeting['host']}, which "
                    f"leaves {end - first} for rank {rank}, but it needs {n_asked or 1}: start "
                    "fewer ranks there, or ask for fewer devices"
                )
            for device_id in part:
                if device_id in owners:
                    raise ValueError(
                        f"rank {rank} ({greeting['host']}) and rank {owners[device_id]} both have "
                        f"the device that rank {rank} calls {names[device_id]}, but they do not "
                        "see the same other devices: let both see the same devices, or none in "
                        "common"
                    )
                owners[device_id] = rank
            devices[rank] = [names[device_id] for device_id in part]
    return [devices[rank] for rank in range(len(hellos))]


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
    try:
        return [
            int(psutil.virtual_memory().available) // n_sharing
            if device.type == "cpu"
            else int(torch.get_device_module(device.type).mem_get_info(device)[0])
            for device in devices
        ]
    except RuntimeError as error:  # of a GPU that others have filled
        why = str(error).split("\n")[0]
        raise RuntimeError(
            f"rank {rank} ({own['host']}) cannot tell how much memory is free: {why}"
        ) from None

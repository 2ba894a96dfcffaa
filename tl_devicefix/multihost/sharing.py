"""Which rank has which devices of a host that several are on, and what those may hold."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from tl_devicefix.simulation.backend import real_accelerator

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def visible_devices(n_devices: int | None) -> list[tuple[str, str]]:
    """The devices that this process sees, and by what all processes know each.

    Args:
        n_devices: how many it is to have, of CPU devices, of which there are as many as it says.

    Raises:
        ValueError: if there are not so many, or it asks for none.
    """
    if n_devices is not None and n_devices < 1:
        raise ValueError(f"n_devices={n_devices}: each rank has one or more")
    accelerator = real_accelerator()
    if accelerator is None:  # another process's CPU device is another one
        return [("cpu", uuid.uuid4().hex) for _ in range(n_devices or 1)]
    of_type = torch.get_device_module(accelerator.type)
    there = [torch.device(accelerator.type, index) for index in range(of_type.device_count())]
    if (n_devices or 0) > len(there):
        raise ValueError(
            f"n_devices={n_devices}, but this rank has {len(there)} device(s) of type "
            f"{accelerator.type!r}: ask for fewer"
        )
    return [(str(each), _id_of(each)) for each in there]


_TELLING = ("uuid", "pci_domain_id", "pci_bus_id", "pci_device_id")
"""Properties that tell devices apart: some of AMD have no UUID, and parts of one the same place."""


def _id_of(device: torch.device) -> str:
    of_type = torch.get_device_module(device.type)
    has_properties = hasattr(of_type, "get_device_properties")  # MPS has none
    properties = of_type.get_device_properties(device) if has_properties else None
    found = [str(getattr(properties, each)) for each in _TELLING if hasattr(properties, each)]
    return " ".join([machine(), *(found or [str(device)])])


def machine() -> str:
    """What processes with the same memory have in common, whatever their hosts are called."""
    return _BOOT.read_text().strip() if _BOOT.exists() else f"{uuid.getnode():x}"


def shared(everyone: Sequence[Any]) -> list[list[str]]:
    """Share devices among ranks that see the same ones: equal parts, in order.

    Args:
        everyone: what each rank said of itself. One that says how many it is to have gets these
            first.

    Returns:
        The devices of each rank, as it calls them.

    Raises:
        ValueError: if there are too few, or two ranks see the same one, but not the same others.
    """
    groups: dict[frozenset[str], list[int]] = {}
    for rank, each in enumerate(everyone):
        groups.setdefault(frozenset(found for _, found in each["sees"]), []).append(rank)
    ids: dict[int, list[str]] = {}
    for ranks in groups.values():
        ids |= _parts(everyone, ranks)
    for rank in ids:
        _raise_if_another_has(everyone, ids, rank)
    names = [{found: name for name, found in each["sees"]} for each in everyone]
    return [[names[rank][found] for found in ids[rank]] for rank in range(len(everyone))]


def _parts(everyone: Sequence[Any], ranks: list[int]) -> dict[int, list[str]]:
    """The devices of ranks that see the same ones."""
    left, parts = [found for _, found in everyone[ranks[0]]["sees"]], {}
    asking = [rank for rank in ranks if everyone[rank]["n_devices"]]
    for rank in asking:
        n_asked = everyone[rank]["n_devices"]
        if n_asked > len(left):
            raise ValueError(
                f"n_devices={n_asked}, but of the devices of rank {rank}'s host "
                f"({everyone[rank]['host']}) other ranks leave {len(left)}: ask for fewer"
            )
        parts[rank], left = left[:n_asked], left[n_asked:]
    others = [rank for rank in ranks if rank not in asking]
    if len(others) > len(left):
        n_there = len(everyone[ranks[0]]["sees"])
        raise ValueError(
            f"{len(ranks)} ranks are on {everyone[ranks[0]]['host']}, which has too few devices, "
            f"{n_there}, for each to have {'what it asks for, or ' if asking else ''}one: start "
            "fewer there"
        )
    for number, rank in enumerate(others):
        first, end = (len(left) * each // len(others) for each in (number, number + 1))
        parts[rank] = left[first:end]
    return parts


def _raise_if_another_has(everyone: Sequence[Any], ids: dict[int, list[str]], rank: int) -> None:
    for name, found in everyone[rank]["sees"]:
        for other in range(rank):
            if found in ids[rank] and found in ids[other]:
                raise ValueError(
                    f"ranks {other} and {rank} ({everyone[rank]['host']}) both have the device "
                    f"that rank {rank} calls {name}, but not the same others: let each see devices "
                    "of its own, or both the same"
                )


def free_memory(devices: Sequence[torch.device], everyone: Sequence[Any], rank: int) -> list[int]:
    """Bytes that each of a rank's devices may hold: as it said, or what is free.

    CPU devices of one machine have equal parts of that, whatever rank they are of.
    """
    own = everyone[rank]
    if own["memory"] is not None:
        return [own["memory"]] * len(devices)
    n_sharing = sum(
        name == "cpu"
        for each in everyone
        if each["machine"] == own["machine"] and each["memory"] is None
        for name, _ in each["sees"]
    )
    return [
        int(psutil.virtual_memory().available) // n_sharing
        if each.type == "cpu"
        else int(torch.get_device_module(each.type).mem_get_info(each)[0])
        for each in devices
    ]

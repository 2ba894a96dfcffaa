"""The devices that a user speaks of before there are any: how many, what each has, whose it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tl_devicefix.placement.deciding import tell_of_unused
from tl_devicefix.placement.sites import (
    DEVICE_TYPE,
    Hosts,
    Site,
    check_number,
    names_host,
    site_named,
    sites_on,
)

UNLIMITED = 2**60
"""Bytes of a device of which nothing is known, or asked."""


def on_hosts(n_devices: int | None, hosts: Hosts | None) -> tuple[Site, ...]:
    """Of which host each device would be; nothing if nothing is said of hosts.

    Raises:
        ValueError: if the devices cannot be divided over these.
    """
    says_each = isinstance(hosts, list | tuple) and n_devices is None
    if hosts is not None and type(n_devices) is not int and not says_each:
        raise ValueError(
            f"hosts={hosts!r} does not say how many devices they have: give n_devices, of all "
            "hosts together"
        )
    return sites_on(n_devices, hosts)


def by_index(named: Any, sites: Sequence[Site] = ()) -> Any:
    """A `device_map` or `max_memory` with "cuda:1" called 1, as the machine may have none.

    Args:
        named: it.
        sites: of which host each device is, by which "host1/cuda:1" has an index.

    Raises:
        ValueError: if no host has such a device.
    """

    def index(device: Any) -> Any:
        if names_host(device):
            return site_named(device, sites).index
        kind, _, number = str(device).partition(":")
        return int(number) if kind != "cpu" and number.isdecimal() else device

    if not isinstance(named, Mapping):
        return named if isinstance(named, int) else index(named) if named is not None else None
    return {index(key): index(value) for key, value in named.items()}


class Described(NamedTuple):
    """What a user says of devices, by their indices."""

    n_devices: int
    """How many there must be."""
    device_map: Any
    max_memory: Any
    memory: Any
    names_used: bool
    """Whether `max_memory` alone says which of them are used."""


def described(
    n_devices: int | None, hosts: Hosts | None, device_map: Any, max_memory: Any, memory: Any
) -> Described:
    """Read what a user says of devices; the log tells of those that are named and not there.

    Raises:
        ValueError: if that does not fit together, or is more than there may be.
    """
    sites = on_hosts(n_devices, hosts)
    device_map, max_memory, memory = (by_index(e, sites) for e in (device_map, max_memory, memory))
    named = [*(device_map.values() if isinstance(device_map, Mapping) else [device_map])]
    named += [key for sizes in (max_memory, memory) if isinstance(sizes, Mapping) for key in sizes]
    least = 1 + max((index for index in named if type(index) is int), default=0)
    there: Any = len(sites) or (least if n_devices is None else n_devices)
    check_number(there)
    names_used = False
    if isinstance(max_memory, Mapping):
        numbers = [key for key in max_memory if type(key) is int]
        names_used = bool(numbers) and n_devices is None and not sites
        used = [*map(_called, range(there)), *(["cpu"] if "cpu" in max_memory else [])]
        beyond = {index for index in numbers if index >= there}
        tell_of_unused([*map(_called, beyond)], used)
        max_memory = {key: size for key, size in max_memory.items() if key not in beyond}
    return Described(there, device_map, max_memory, memory, names_used)


def _called(index: int) -> str:
    return f"{DEVICE_TYPE}:{index}"


def rooms(memory: Any, n_devices: int) -> dict[Any, Any]:
    """A size for each device: one for all, or those that are named, and 80 GiB for the rest."""
    named = memory if isinstance(memory, Mapping) else dict.fromkeys(range(n_devices), memory)
    return {**dict.fromkeys(range(n_devices), "80GiB"), **named}

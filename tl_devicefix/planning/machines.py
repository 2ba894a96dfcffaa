"""The devices that a user speaks of before there are any: how many, what each has, whose it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tl_devicefix.placement.deciding import tell_of_unused
from tl_devicefix.simulation.machine import DEVICE_TYPE, sites_on
from tl_devicefix.simulation.sites import Hosts, Site, names_host, site_named

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


def how_many(n_devices: int | None, device_map: Any, *sizes: Any) -> int:
    """How many devices there must be.

    Args:
        n_devices: what the user says; None for as many as the other arguments name.
        device_map: by index.
        sizes: `max_memory` and its like, by index.
    """
    if n_devices is not None:
        return n_devices
    named = [*(device_map.values() if isinstance(device_map, Mapping) else [device_map])]
    named += [key for each in sizes if isinstance(each, Mapping) for key in each]
    return 1 + max((each for each in named if type(each) is int), default=0)


def names_devices(max_memory: Any) -> bool:
    """Whether it says which devices to use, and not only what is offloaded, or one size for all."""
    return isinstance(max_memory, Mapping) and any(type(key) is int for key in max_memory)


def within(max_memory: Any, n_devices: int) -> Any:
    """`max_memory`, by index, without devices that there are not; the log says so, as `plan`'s."""
    if not isinstance(max_memory, Mapping):
        return max_memory
    beyond = [key for key in max_memory if type(key) is int and key >= n_devices]
    used = [*range(n_devices), *(key for key in max_memory if key == "cpu")]
    tell_of_unused(*([_called(key) for key in keys] for keys in (beyond, used)))
    return {key: size for key, size in max_memory.items() if key not in beyond}


def _called(key: int | str) -> str:
    return key if isinstance(key, str) else f"{DEVICE_TYPE}:{key}"


def rooms(memory: Any, n_devices: int) -> dict[Any, Any]:
    """A size for each device: one for all, or those that are named, and 80 GiB for the rest."""
    named = memory if isinstance(memory, Mapping) else dict.fromkeys(range(n_devices), memory)
    return {**dict.fromkeys(range(n_devices), "80GiB"), **named}

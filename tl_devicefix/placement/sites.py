"""The host that a device belongs to, and its name there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

DEVICE_TYPE = "sim"
Hosts = int | list[int] | tuple[int, ...]
"""How many hosts there are, of as many devices each, or how many devices each of them has."""


@dataclass(frozen=True)
class Site:
    """Where a device is.

    Attributes:
        index: that of the device, as torch calls it in this process: of sim:9, 9.
        host: the host's number, from 0 on: after `tl_devicefix.init_hosts`, its rank.
        hostname: what the host is called: "node-b"; "host1", where it has no name of its own.
        number: which of the host's devices it is, from 0 on.
        device: what the host calls it: "cuda:1"; "1", where it is simulated.
    """

    index: int
    host: int
    hostname: str
    number: int
    device: str

    @property
    def torch_device(self) -> torch.device:
        """The device, as torch calls it in this process."""
        return torch.device(DEVICE_TYPE, self.index)

    @property
    def name(self) -> str:
        """Host and device: "node-b/cuda:1"."""
        return f"{self.hostname}/{self.device}"

    def is_called(self, device: str) -> bool:
        """Whether "cuda:1" or "1" names this device on its host, or "cuda", if it is the first.

        A simulated one is of any type.
        """
        number = str(self.number)
        _kind, _, index = device.rpartition(":")
        if self.device == number:
            return index == number or (not self.number and not index.isdecimal())
        own_kind = self.device.partition(":")[0]
        return device in (self.device, number) or (not self.number and device == own_kind)


def divided(n_devices: int | None, hosts: Hosts) -> tuple[Site, ...]:
    """The sites of devices that are divided over hosts: evenly, or as many as each has."""
    places = [
        (host, number)
        for host, on_it in enumerate(_on_each(n_devices, hosts))
        for number in range(on_it)
    ]
    return tuple(
        Site(index, host, f"host{host}", number, str(number))
        for index, (host, number) in enumerate(places)
    )


def sites_on(n_devices: int | None, hosts: Hosts | None) -> tuple[Site, ...]:
    """The sites of so many devices; none if `hosts` is None."""
    return () if hosts is None else divided(n_devices, hosts)


def _on_each(n_devices: int | None, hosts: Hosts) -> Sequence[int]:
    """How many devices each host has."""
    if isinstance(hosts, list | tuple):
        if not hosts or any(type(count) is not int or count < 1 for count in hosts):
            raise ValueError(f"each host must have 1 device or more, but hosts is {hosts!r}")
        if n_devices not in (None, sum(hosts)):
            raise ValueError(
                f"n_devices is {n_devices}, but hosts={hosts!r} have {sum(hosts)}: leave "
                "n_devices out"
            )
        check_number(sum(hosts))
        return hosts
    if type(hosts) is not int or hosts < 1:
        raise ValueError(
            f"hosts must be an int of 1 or more, or a list of how many devices each has, but is "
            f"{hosts!r}"
        )
    if not n_devices or n_devices % hosts:
        raise ValueError(
            f"n_devices={n_devices} cannot be divided evenly over hosts={hosts}: give the devices "
            f"of all hosts together, a multiple of {hosts}, or a list of how many each has"
        )
    check_number(n_devices)
    return [n_devices // hosts] * hosts


def check_number(n_devices: object) -> None:
    """Check that there may be so many devices."""
    if type(n_devices) is not int or not 1 <= n_devices <= _MOST_DEVICES:
        raise ValueError(f"n_devices must be from 1 to {_MOST_DEVICES}, but is {n_devices!r}")


_MOST_DEVICES = 64


def names_host(named: object) -> bool:
    """Whether a device is named with its host: "host1/cuda:3"."""
    return isinstance(named, str) and "/" in named


def site_named(name: str, sites: Sequence[Site]) -> Site:
    """The site that is meant by "node-b/cuda:1", "host1/cuda:1" or "host1/1"."""
    host, _, device = name.rpartition("/")
    on_host = [site for site in sites if site.hostname == host]
    on_host = on_host or [site for site in sites if f"host{site.host}" == host]
    for site in on_host:
        if site.is_called(device):
            return site
    if not sites:
        raise ValueError(
            f"device {name!r} names a host, but no other host has joined: call "
            "tl_devicefix.init_hosts() first, or leave the host out"
        )
    raise ValueError(f"device {name!r} does not exist: name one of {listed(sites)}")


def listed(sites: Sequence[Site]) -> str:
    """Each host and its devices, in short: "node-a/cuda:0 to cuda:7, node-b/cuda:0 to cuda:7"."""
    by_host: dict[int, list[Site]] = {}
    names = {site.hostname for site in sites}
    for site in sites:
        by_host.setdefault(site.host, []).append(site)
    ranges = []
    for first, *others in by_host.values():
        number = f"host{first.host}"
        also = "" if number in names else f" ({number})"  # of a host that has it, that is the name
        ranges.append(first.name + (f" to {others[-1].device}" if others else "") + also)
    return ", ".join(ranges)

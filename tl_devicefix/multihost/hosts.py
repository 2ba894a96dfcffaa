"""The hosts that have joined: their workers, and the names and numbers of their devices."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from typing import Any

import torch

from tl_devicefix.placement.devices import default_device, device_count, has_index, set_others
from tl_devicefix.placement.elsewhere import NOBODY, Elsewhere, elsewhere


class HostLost(RuntimeError):
    """Raised if a host is lost with its blocks; the message names it."""


class Host:
    """A host that has joined. A subclass reaches its worker, and has to keep these promises:

    - Several threads may call at once, and a call may take long.
    - Arguments and values are None, numbers, strings, dtypes, devices, classes, dense CPU tensors
      without gradients, and tuples, lists, dicts and messages (see `messages.py`) of these.
    - A tensor that arrives belongs to its receiver, which may write to it.

    Attributes:
        name: "node-b"; "host1" if two hosts have the same name.
        devices: the names of its devices there ("cuda:0"), in order.
        forgotten: numbers of values that the worker may free. The next run, load or
            `free_memory` sends them.
    """

    def __init__(self, name: str, devices: tuple[str, ...] = ()) -> None:
        self.name, self.devices, self.forgotten = name, devices, list[int]()

    def end(self) -> None:
        """End the worker."""
        raise NotImplementedError

    def call(self, method: str, *arguments: object) -> Any:
        """Call a method of the host's `Worker`, and wait for its result.

        Raises:
            HostLost: within seconds, if the host is lost.
        """
        raise NotImplementedError

    def take_forgotten(self) -> list[int]:
        """Empty `forgotten`, and return its numbers."""
        taken: list[int] = []
        with contextlib.suppress(IndexError):  # other threads may append, and take
            while True:
                taken.append(self.forgotten.pop())
        return taken


class Hosts(Elsewhere):
    """The devices of this process, and then of each host that has joined."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        here = default_device()
        own = [here]
        if has_index(here):
            own = [torch.device(here.type, number) for number in range(device_count(here.type))]
        named = [(socket.gethostname(), tuple(map(str, own)))]
        named += [(host.name, host.devices) for host in hosts]
        n_elsewhere = sum(len(host.devices) for host in hosts)
        self.devices = (*own, *map(elsewhere, range(n_elsewhere)))
        self._names: dict[torch.device, str] = {}
        # Host -> a device's name or number there -> the device.
        by_number: dict[str, dict[str, torch.device]] = {}
        by_name: dict[str, dict[str, torch.device]] = {}
        left = iter(self.devices)
        for number, (host, names) in enumerate(named):
            there = list(zip(names, left))
            self._names |= {device: f"{host}/{name}" for name, device in there}
            numbered = {str(index): device for index, (_, device) in enumerate(there)}
            by_number[f"host{number}"] = by_name[host] = numbered | dict(reversed(there))
        self._by_host = by_number | by_name  # a host's name takes precedence over a number
        self.listed = ", ".join(
            f"{host}/{first}"
            + (f" to {others[-1]}" if others else "")
            + ("" if f"host{number}" in by_name else f" (host{number})")
            for number, (host, (first, *others)) in enumerate(named)
        )

    def find(self, name: str) -> torch.device:
        """Return the device of "node-b/cuda:1", "node-b/1" or "host1/cuda:1"."""
        host, _, device = name.rpartition("/")
        found = self._by_host.get(host, {}).get(device)
        if found is None:
            raise ValueError(f"device {name!r} does not exist: name one of {self.listed}")
        return found

    def name_of(self, device: torch.device) -> str:
        """Return a device's name with its host: "node-b/cuda:1"."""
        return self._names.get(device, str(device))

    def free_memory(self, device: torch.device) -> int:
        """Return a device's free bytes, after its worker has freed what nobody needs."""
        host, number = host_of(device)
        return int(host.call("free_memory", number, host.take_forgotten()))


_joined: tuple[Host, ...] = ()


def join(hosts: Sequence[Host]) -> None:
    """Make the devices of these hosts, and of no others, known in this process."""
    global _joined
    _joined = tuple(hosts)
    set_others(Hosts(hosts) if hosts else NOBODY)


def joined_hosts() -> tuple[Host, ...]:
    """Return the hosts that have joined, in order, without this process's own."""
    return _joined


def host_of(device: torch.device) -> tuple[Host, int]:
    """Return the host of a device elsewhere, and the device's number there."""
    devices = [(host, number) for host in _joined for number in range(len(host.devices))]
    return devices[device.index]

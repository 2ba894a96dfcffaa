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
    - Arguments and values are None, numbers, strings, dtypes, devices, classes, dense tensors, and
      tuples, lists, dicts and messages (see `messages.py`) of these.
    - A tensor arrives on the CPU, without gradients, and its receiver may write to it.

    Attributes:
        name: "node-b"; "host1" if two hosts have the same name.
        devices: the names of its devices there ("cuda:0"), in order.
        forgotten: numbers of values that the worker may free, which the next call sends.
    """

    def __init__(self, name: str, devices: tuple[str, ...] = ()) -> None:
        self.name, self.devices, self.forgotten = name, devices, list[int]()

    def end(self) -> None:
        """End the worker."""
        raise NotImplementedError

    def send(self, *message: object) -> Any:
        """Send the arguments of `Worker.call`, and wait for its result.

        Raises:
            HostLost: if the host is lost.
        """
        raise NotImplementedError

    def call(self, method: str, *arguments: object) -> Any:
        """Call a method of the host's `Worker`, and wait for its result."""
        forget: list[int] = []
        with contextlib.suppress(IndexError):  # other threads may append, and take
            while True:
                forget.append(self.forgotten.pop())
        return self.send(method, arguments, forget)


class Hosts(Elsewhere):
    """The devices of this process, and then of each host that has joined."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        here = default_device()
        own = [here]
        if has_index(here):
            own = [torch.device(here.type, number) for number in range(device_count(here.type))]
        named = [(socket.gethostname(), tuple(map(str, own)))]
        named += [(host.name, host.devices) for host in hosts]
        names = [f"{host}/{device}" for host, devices in named for device in devices]
        self.devices = (*own, *map(elsewhere, range(len(names) - len(own))))
        self._names = dict(zip(self.devices, names))
        self._by_name = dict(zip(names, self.devices))
        self.listed = ", ".join(
            f"{host}/{first}" + (f" to {others[-1]}" if others else "")
            for host, (first, *others) in named
        )

    def find(self, name: str) -> torch.device:
        """Return the device that has a name such as "node-b/cuda:1"."""
        if name not in self._by_name:
            raise ValueError(f"device {name!r} does not exist: name one of {self.listed}")
        return self._by_name[name]

    def name_of(self, device: torch.device) -> str:
        """Return a device's name with its host: "node-b/cuda:1"."""
        return self._names.get(device, str(device))

    def free_memory(self, device: torch.device) -> int:
        """Return a device's free bytes, after its worker has freed what nobody needs."""
        host, number = host_of(device)
        return int(host.call("free_memory", number))


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

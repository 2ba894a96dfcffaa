"""Other hosts, played by workers in this process: each call runs in a thread, on copies."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from tl_devicefix.multihost import messages
from tl_devicefix.multihost.hosts import Host, join, joined_hosts
from tl_devicefix.multihost.init_hosts import _packed, _unpacked
from tl_devicefix.multihost.worker import Worker


class LocalHost(Host):
    """A worker in this process, called like one on another host.

    Attributes:
        calls: names of the methods that were called.
    """

    def __init__(self, name: str, worker: Worker) -> None:
        super().__init__(name, worker.devices)
        self.worker = worker
        self.calls: list[str] = []
        self._threads = ThreadPoolExecutor(32, f"{name} ")

    def send(self, *message: Any) -> Any:
        self.calls.append(message[0])
        return _unpacked(self._threads.submit(self._call, _packed(message)).result())

    def _call(self, packed: Any) -> Any:
        message = _unpacked(packed)
        _check(message)
        value = self.worker.call(*message)
        _check(value)
        return _packed(value)


def _check(value: Any) -> None:
    """Check that a value is one that may be sent."""
    if isinstance(value, tuple | list):
        for item in value:
            _check(item)
    elif isinstance(value, dict):
        _check([*value, *value.values()])
    elif dataclasses.is_dataclass(value) and type(value).__module__ == messages.__name__:
        _check(vars(value))
    else:
        kinds = (bool, int, float, str, torch.dtype, torch.device, torch.Tensor)
        assert value is None or isinstance(value, (*kinds, type)), type(value)


@contextmanager
def hosts(**counts: int) -> Iterator[list[LocalHost]]:
    """Within `hosts(node_b=2)`, node-b has joined with two devices, and no other host."""
    before = joined_hosts()
    devices = {name.replace("_", "-"): ("cpu",) * count for name, count in counts.items()}
    joined = [LocalHost(name, Worker(own)) for name, own in devices.items()]
    join(joined)
    try:
        yield joined
    finally:
        join(before)


def simulated_by_hosts(n_devices: int, *args: Any, **options: Any) -> AbstractContextManager[Any]:
    """In place of `tl_devicefix.simulate`: the CPU, and devices of two other hosts."""
    counts = {"node_b": n_devices // 2, "node_c": (n_devices - 1) // 2}
    return hosts(**{name: count for name, count in counts.items() if count})

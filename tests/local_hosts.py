"""Other hosts as workers in this process: what they are asked runs in a thread, on copies."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from tl_devicefix.multihost.worker import Worker
from tl_devicefix.placement.devices import Host, join, joined_hosts


class LocalConnection:
    """A worker of this process, asked as one of another host is.

    Attributes:
        name: its host's.
        calls: names of the methods that were called.
    """

    def __init__(self, name: str, worker: Worker) -> None:
        self.name, self.worker = name, worker
        self.calls: list[str] = []
        self._threads = ThreadPoolExecutor(32, f"{name} ")

    def end(self) -> None:
        self._threads.shutdown()

    def call(self, method: str, *arguments: Any) -> Any:
        self.calls.append(method)
        future = self._threads.submit(self._call, method, copy.deepcopy(arguments))
        return copy.deepcopy(future.result())

    def _call(self, method: str, arguments: Any) -> Any:
        value = getattr(self.worker, method)(*arguments)
        _check(value)
        return value


def _check(value: Any) -> None:
    """Check that a value is one that may be sent."""
    if isinstance(value, tuple | list):
        for item in value:
            _check(item)
    elif isinstance(value, dict):
        _check([*value, *value.values()])
    else:
        kinds = (bool, int, float, str, torch.dtype, torch.Tensor)
        assert value is None or type(value) in kinds, type(value)
        if isinstance(value, torch.Tensor):
            assert value.device.type == "cpu"
            assert not value.requires_grad


@contextmanager
def hosts(*names: str, devices: tuple[str, ...] = ("cpu",)) -> Iterator[list[LocalConnection]]:
    """Within it, hosts of these names have joined, each with these devices, and no others."""
    before = joined_hosts()
    connections = [LocalConnection(name, Worker(devices)) for name in names]
    join([Host(connection, devices) for connection in connections])
    try:
        yield connections
    finally:
        join(before)


@contextmanager
def simulated_by_hosts(n_devices: int, *args: Any, **options: Any) -> Iterator[None]:
    """In place of `tl_devicefix.simulate`: the CPU, and devices of two other hosts."""
    n_other, n_of_last = n_devices - 1, (n_devices - 1) // 2
    counts = {"node-b": n_other - n_of_last, "node-c": n_of_last}
    with ExitStack() as stack:
        connections = [
            LocalConnection(name, Worker(("cpu",) * count))
            for name, count in counts.items()
            if count
        ]
        join([Host(connection, connection.worker.devices) for connection in connections])
        stack.callback(join, [])
        yield

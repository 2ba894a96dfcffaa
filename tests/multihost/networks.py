"""Networks of hosts, each of which has addresses of its own, on one machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

_HAS_NETWORKS = os.geteuid() == 0 and shutil.which("ip") is not None
NETWORKS = pytest.mark.skipif(not _HAS_NETWORKS, reason="network namespaces need root, and ip")


def ip(*command: str) -> None:
    subprocess.run(["ip", *command], check=True, capture_output=True)


def on(names: list[str]) -> dict[str, Any]:
    """How `launch` has each rank in a network of its own."""
    of_rank = {rank: {"network": name} for rank, name in enumerate(names)}
    return {"world_size": len(names), "of_rank": of_rank, "address": "10.77.0.1"}


@contextmanager
def _namespaces(*names: str) -> Iterator[list[str]]:
    """Networks of their own."""
    result = [f"{name}-{os.getpid()}" for name in names]
    for name in result:
        ip("netns", "add", name)
    try:
        yield result
    finally:
        for name in result:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _set_up(name: str, rank: int) -> None:
    """Give a rank's network an address."""
    ip("-n", name, "addr", "add", f"10.77.0.{rank + 1}/24", "dev", f"cable{rank}")
    for link in (f"cable{rank}", "lo"):
        ip("-n", name, "link", "set", link, "up")


@pytest.fixture
def two_hosts() -> Iterator[list[str]]:
    """Two network namespaces with a cable between them."""
    with _namespaces("rank0", "rank1") as names:
        ip("link", "add", "cable0", "netns", names[0], "type", "veth", "peer", "name", "cable1",
           "netns", names[1])  # fmt: skip
        for rank, name in enumerate(names):
            _set_up(name, rank)
        yield names

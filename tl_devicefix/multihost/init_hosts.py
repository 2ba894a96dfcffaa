"""How other hosts join: `init_hosts`, which puts a worker on each other node of a Ray cluster."""

from __future__ import annotations

import atexit
import importlib.util
import logging
import os
import re
import socket
import threading
import traceback
import warnings
from collections import Counter
from typing import Any

import transformers.utils.logging as hf_logging

from tl_devicefix.multihost.ray_connection import RayConnection, own_versions
from tl_devicefix.placement.devices import Host, HostLost, join
from tl_devicefix.placement.in_use import held_by

_log = logging.getLogger(__name__)
_SHORTEST_TIMEOUT = 2.0
"""Seconds; a busy machine may have no time to answer a ping for one."""
_INSTALL = 'pip install "tl_devicefix[hosts]"'
_cluster: _Cluster | None = None
_joining = threading.Lock()


def init_hosts(address: str = "auto", *, timeout: float = 15.0, wait: float = 600.0) -> None:
    """Add the devices of all nodes of a Ray cluster to those of this process, the driver.

    It starts a worker on each other node, with all of its devices. Workers end with this process.
    If any other node has GPUs, those without are left out. In a cluster of one node, and without a
    cluster unless you ask for one, it does nothing. After a lost host, call it again: it starts new
    workers on the nodes that are left.

    Args:
        address: the head node's, "head:6379"; by default RAY_ADDRESS, or the cluster that this
            machine is a node of. A connection that `ray.init` has made is used as it is.
        timeout: seconds after which a worker that stands still counts as lost.
        wait: seconds to wait for workers to start.

    Raises:
        ImportError: if a cluster is asked for, and Ray is not installed.
        ConnectionError: if no cluster is at the address, or it has another token.
        RuntimeError: if a node has other versions of what it computes with (Python, torch,
            transformers, TransformerLens, this package), or starts no worker in time.
    """
    global _cluster
    if timeout < _SHORTEST_TIMEOUT:
        raise ValueError(
            f"timeout must be {_SHORTEST_TIMEOUT:g} seconds or more, but is {timeout:g}"
        )
    with _joining:
        if _cluster is not None:
            if _cluster.is_whole:
                return
            _cluster.close()
            _cluster = None
        if not _connect(address):
            return
        cluster = _Cluster()
        try:
            cluster.start(timeout, wait)
        except BaseException:  # an interrupt too
            cluster.close()
            raise
        _cluster = cluster


def _connect(address: str) -> bool:
    """Connect to a Ray cluster, unless there is none, and none is asked for."""
    asked_for = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
    if importlib.util.find_spec("ray") is None:
        if asked_for:
            raise ImportError(f"init_hosts() needs Ray to join {asked_for!r}: {_INSTALL}")
        warnings.warn(
            f"init_hosts() has joined no other host, as Ray is not installed: {_INSTALL}",
            stacklevel=3,
        )
        return False
    import ray

    if ray.is_initialized():
        return True
    _check_that_it_answers(asked_for)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError as error:
        if "AuthenticationError" in "".join(traceback.format_exception(error)):
            raise ConnectionError(
                f"the Ray cluster at {address!r} refuses this process's token: set "
                "RAY_AUTH_MODE=token and the same RAY_AUTH_TOKEN as its nodes, before Ray is "
                "imported"
            ) from error
        if asked_for or "Could not find any running Ray instance" not in str(error):
            raise
        return False
    return True


def _check_that_it_answers(address: str) -> None:
    """Raise at once if nothing listens at "head:6379", as Ray would wait for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as error:
        raise ConnectionError(
            f"no Ray cluster answers at {address}: start one there by `ray start --head`, or give "
            f"its address ({error})"
        ) from error


def _other_nodes() -> list[tuple[str, dict[str, Any]]]:
    """The nodes that get a worker, by name: "node-b"; "host1", where several have one name."""
    import ray

    own = ray.get_runtime_context().get_node_id()
    alive = [node for node in ray.nodes() if node["Alive"]]
    names = Counter(node["NodeManagerHostname"] for node in alive)
    others = [node for node in alive if node["NodeID"] != own]
    others = [node for node in others if node["Resources"].get("GPU")] or others
    others.sort(key=lambda node: (_natural(node["NodeManagerHostname"]), node["NodeID"]))
    named = []
    for number, node in enumerate(others, 1):
        hostname = node["NodeManagerHostname"]
        named.append((hostname if names[hostname] == 1 else f"host{number}", node))
    return named


def _natural(name: str) -> list[tuple[str, int]]:
    """To sort names so that node-2 comes before node-10."""
    return [(text, int(number or 0)) for text, number in re.findall(r"(\D*)(\d*)", name)]


def _described(connection: RayConnection, wait: float) -> Host:
    """A host, once its worker has started; one with other versions is refused."""
    description = connection.describe(wait)
    for package, version in own_versions().items():
        there = description["versions"][package]
        if there != version:
            raise RuntimeError(
                f"{connection.name} has {package} {there}, and this process has {version}: "
                "install the same on both"
            )
    return Host(connection, tuple(description["devices"]))


class _Cluster:
    """The workers on the other nodes, all of which end if one is lost.

    Attributes:
        lost: the error of the one that was lost.
    """

    def __init__(self) -> None:
        self.lost: HostLost | None = None
        self._connections: list[RayConnection] = []
        self._losing = threading.Lock()

    @property
    def is_whole(self) -> bool:
        """Whether there are workers, and all of them."""
        return self.lost is None and bool(self._connections)

    def start(self, timeout: float, wait: float) -> None:
        """Put a worker on each other node, and have their devices."""
        self._connections = [
            RayConnection(name, node["NodeID"], node["Resources"].get("GPU", 0), self._lose)
            for name, node in _other_nodes()
        ]
        atexit.register(self.close)  # is called before Ray's own, which was registered before
        hosts = []
        for connection in hf_logging.tqdm(self._connections.copy(), desc="Starting workers"):
            try:
                hosts.append(_described(connection, wait))
            except HostLost as error:  # as of one that was lost just before
                _log.warning("%s", error)
                self._connections.remove(connection)
        for connection in self._connections:
            connection.watch(timeout)
        join(hosts)
        for host in hosts:
            _log.info("%s has joined, with %s", host.connection.name, ", ".join(host.devices))

    def close(self) -> None:
        """End all workers."""
        atexit.unregister(self.close)
        join([])
        for connection in self._connections:
            connection.close()

    def _lose(self, connection: RayConnection, why: str) -> HostLost:
        """Give up: whoever waits for any host is told which one is lost."""
        with self._losing:
            if self.lost is None:
                name = connection.name
                self.lost = HostLost(
                    f"{name}{held_by(name)} is lost: {why}; call tl_devicefix.init_hosts() and "
                    "load the model again",
                    name,
                )
                for other in self._connections:
                    other.close()
            return HostLost(str(self.lost), self.lost.host)

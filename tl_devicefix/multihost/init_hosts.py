"""`init_hosts`: start a worker on each other node of a Ray cluster."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections import Counter
from typing import Any

import torch
import transformers.utils.logging as hf_logging
from torch.utils._pytree import tree_map_only

from tl_devicefix.monkeypatch.versions import versions
from tl_devicefix.multihost.hosts import Host, HostLost, join, joined_hosts
from tl_devicefix.multihost.worker import Worker
from tl_devicefix.placement.elsewhere import plain
from tl_devicefix.placement.workers import one_load

_log = logging.getLogger(__name__)
_CALLS_AT_ONCE = 64
_PACKAGES_ALIKE = ("torch", "transformers", "transformer_lens", "tl_devicefix")


def init_hosts(address: str = "auto", *, wait: float = 600.0) -> None:
    """Add the devices of all nodes of a Ray cluster to those of this process, the driver.

    It starts a worker on each other node, with all of its devices. Workers end with this process.
    If any other node has GPUs, those without are left out. A cluster of one node adds nothing, nor
    does a missing cluster that you do not ask for (by `address` or RAY_ADDRESS). A second call does
    nothing unless a host is lost: then it starts new workers on the nodes that are left.

    Args:
        address: the head node's, "head:6379"; by default RAY_ADDRESS, or the cluster that this
            machine is a node of. A connection that `ray.init` has made is used as it is.
        wait: seconds to wait for workers to start.

    Raises:
        ImportError: if Ray is not installed.
        ConnectionError: if no cluster is at the address.
        RuntimeError: if a node has another version of torch, transformers, TransformerLens or this
            package, or starts no worker in time.
    """
    with one_load:
        with contextlib.suppress(HostLost):
            for host in joined_hosts():
                host.call("free_memory", 0)  # any call would do
            if joined_hosts():
                return
        leave_hosts()
        if not _connect(address):
            return
        hosts = [
            RayHost(name, node["NodeID"], node["Resources"].get("GPU", 0))
            for name, node in _other_nodes()
        ]
        try:
            for host in hf_logging.tqdm(hosts, desc="Starting workers"):
                _check_versions(host.name, host.describe(wait))
        except BaseException:  # also an interrupt: workers would hold the GPUs
            for host in hosts:
                host.end()
            raise
        join(hosts)
        for host in hosts:
            _log.info("%s has joined, with %s", host.name, ", ".join(host.devices))


def leave_hosts() -> None:
    """End all workers."""
    for host in joined_hosts():
        host.end()
    join([])


def _connect(address: str) -> bool:
    """Connect to a Ray cluster; return False if there is none and the user named none."""
    try:
        import ray
    except ImportError as error:
        raise ImportError("init_hosts() needs Ray: pip install ray") from error
    if ray.is_initialized():
        return True
    asked_for = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
    _check_that_it_answers(asked_for)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError as error:
        if asked_for or "Could not find any running Ray instance" not in str(error):
            raise
        return False
    return True


def _check_that_it_answers(address: str) -> None:
    """Raise at once if nothing listens at "head:6379"."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return
    try:  # Ray itself waits for minutes
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as error:
        raise ConnectionError(
            f"no Ray cluster answers at {address}: start one there by `ray start --head`, or give "
            f"its address ({error})"
        ) from error


def _other_nodes() -> list[tuple[str, dict[str, Any]]]:
    """Return the nodes that get a worker, by name: "node-b", or "host1" if names are not unique."""
    import ray

    own = ray.get_runtime_context().get_node_id()
    alive = [node for node in ray.nodes() if node["Alive"]]
    names = Counter(node["NodeManagerHostname"] for node in alive)
    others = [node for node in alive if node["NodeID"] != own]
    others = [node for node in others if node["Resources"].get("GPU")] or others
    # Sort them, so that devices have the same numbers in each run.
    others.sort(key=lambda node: (node["NodeManagerHostname"], node["NodeID"]))
    hostnames = [node["NodeManagerHostname"] for node in others]
    called = [h if names[h] == 1 else f"host{number}" for number, h in enumerate(hostnames, 1)]
    return list(zip(called, others))


def _check_versions(host: str, versions_there: dict[str, str]) -> None:
    """Refuse a host with other versions."""
    for package, version in own_versions().items():
        there = versions_there[package]
        if there != version:
            raise RuntimeError(
                f"{host} has {package} {there}, and this process has {version}: install the same "
                "on both"
            )


def own_versions() -> dict[str, str]:
    """Return the versions of the packages that a process computes with; Ray compares Python's.

    Builds of torch for different accelerators, "2.13.0+cu126" and "2.13.0+cpu", count as the same.
    """
    return {name: version.partition("+")[0] for name, version in versions(_PACKAGES_ALIKE).items()}


class WorkerActor(Worker):
    """The actor: a worker with all devices of its node."""

    def __init__(self, n_threads: int) -> None:
        torch.set_num_threads(n_threads)  # the driver's number; Ray alone would give an actor one
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        indices = range(torch.accelerator.device_count())
        super().__init__([f"{accelerator.type}:{i}" for i in indices] if accelerator else ["cpu"])

    def describe(self) -> tuple[tuple[str, ...], dict[str, str]]:
        """Return the worker's devices, and the versions of its packages."""
        return self.devices, own_versions()

    def call_packed(self, *packed: object) -> object:
        """Call a method as `Worker.call` does, with packed arguments; pack its result."""
        return _packed(self.call(*_unpacked(packed)))


class _Packed:
    """A tensor as an array of its bytes."""

    # Ray sends arrays without pickling them. The array is of bytes: numpy lacks bfloat16.
    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype, self.shape = tensor.dtype, tuple(tensor.shape)
        dense = plain(tensor).detach().to("cpu").contiguous()
        self.bytes = dense.reshape(-1).view(torch.uint8).numpy()

    def unpack(self) -> torch.Tensor:
        """Return the tensor, in new memory."""
        # Copy: Ray's memory is read-only. The driver may be within `torch.device("cuda")`.
        tensor = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        tensor.view(-1).view(torch.uint8).numpy()[:] = self.bytes
        return tensor


def _packed(value: object) -> Any:
    return tree_map_only(torch.Tensor, _Packed, value)


def _unpacked(value: object) -> Any:
    return tree_map_only(_Packed, _Packed.unpack, value)


class RayHost(Host):
    """A node of a Ray cluster, whose worker gets all `n_gpus` that Ray has there."""

    def __init__(self, name: str, node_id: str, n_gpus: float) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        super().__init__(name)
        self._ray = ray
        options: dict[str, Any] = {
            "num_cpus": 0,  # Ray's other jobs may hold all CPUs
            "num_gpus": n_gpus,
            "max_restarts": 0,  # a new process would not have the weights
            "max_concurrency": _CALLS_AT_ONCE,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False),
        }
        actor = ray.remote(**options)(WorkerActor)
        self._actor: Any = actor.remote(torch.get_num_threads())

    def describe(self, wait: float) -> dict[str, str]:
        """Wait until the worker has started, set `devices`, and return its packages' versions.

        Raises:
            RuntimeError: if it does not start.
        """
        ray = self._ray
        try:
            self.devices, there = ray.get(self._actor.describe.remote(), timeout=wait)
            return there
        except ray.exceptions.GetTimeoutError:
            raise RuntimeError(
                f"{self.name} has started no worker, which needs all of its GPUs, for {wait:g} s: "
                "`ray status` says what is in use there"
            ) from None
        except ray.exceptions.RayError as error:
            last_line = str(error).strip().splitlines()[-1]
            raise RuntimeError(f"{self.name} cannot start a worker: {last_line}") from error

    def send(self, *message: object) -> Any:
        """Send a message to `Worker.call`, and wait for its result."""
        ray = self._ray
        if not ray.is_initialized():  # the call would start a new cluster
            raise self._lost("ray.shutdown() was called")
        try:
            return _unpacked(ray.get(self._actor.call_packed.remote(*_packed(message))))
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error  # the traceback of the worker
        except ray.exceptions.RayError as error:
            raise self._lost("its process or its node ended") from error

    def _lost(self, why: str) -> HostLost:
        return HostLost(
            f"{self.name} is lost: {why}; call tl_devicefix.init_hosts() and load the model again"
        )

    def end(self) -> None:
        """End the worker, and wake up all threads that wait for it."""
        if self._ray.is_initialized():
            self._ray.kill(self._actor)

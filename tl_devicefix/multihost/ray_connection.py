"""A node's worker as an actor of Ray, and how the driver asks it."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import torch

from tl_devicefix.monkeypatch.versions import versions
from tl_devicefix.multihost.worker import Worker
from tl_devicefix.placement.devices import HostLost
from tl_devicefix.tracebacks import note

_PINGS = "pings"
"""The actor's concurrency group for them, so that no call keeps a ping waiting."""
_CALLS_AT_ONCE = 64
_PACKAGES = ("torch", "transformers", "transformer_lens", "tl_devicefix")
_SECONDS_BETWEEN_PINGS = 1.0
_NODE_DIED = "node has died"
"""Words of Ray."""


class WorkerActor:
    """The actor: a `Worker` with all devices of its node.

    Args:
        name: the host's.
        n_threads: the driver's number of threads, as Ray would give an actor one.
    """

    def __init__(self, name: str, n_threads: int) -> None:
        self._name = name
        torch.set_num_threads(n_threads)
        self._worker = Worker(_visible_devices())

    def describe(self) -> dict[str, Any]:
        """The worker's devices, and the versions of what it computes with."""
        return {"devices": self._worker.devices, "versions": own_versions()}

    def ping(self) -> None:
        """Return, as a process does that does not stand still."""

    def call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """Call a method of the worker."""
        unpacked = _converted(arguments, _Packed, _Packed.unpack)
        try:
            value = getattr(self._worker, method)(*unpacked)
        except Exception as error:
            note(error, f"On {self._name}:\n{traceback.format_exc()}")
            raise
        return _converted(value, torch.Tensor, _Packed)


def own_versions() -> dict[str, str]:
    """The versions of what a process computes with.

    Builds of torch for different accelerators count as the same.
    """
    public = {name: version.partition("+")[0] for name, version in versions(_PACKAGES).items()}
    return {"Python": "{}.{}".format(*sys.version_info), **public}


def _visible_devices() -> list[str]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return ["cpu"]
    return [f"{accelerator.type}:{index}" for index in range(torch.accelerator.device_count())]


class _Packed:
    """A tensor as an array of its bytes: Ray sends arrays without pickling, also large ones."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype, self.shape = tensor.dtype, tuple(tensor.shape)
        self.bytes = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()

    def unpack(self) -> torch.Tensor:
        """A tensor of its own memory, as Ray's cannot be written to."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        tensor.view(-1).view(torch.uint8).numpy()[:] = self.bytes
        return tensor


def _converted(value: Any, kind: type, convert: Callable[[Any], Any]) -> Any:
    """A value in which those of a kind are converted, also in tuples, lists and dicts."""
    if isinstance(value, kind):
        return convert(value)
    if isinstance(value, tuple | list):
        return type(value)([_converted(item, kind, convert) for item in value])
    if isinstance(value, dict):
        return {key: _converted(item, kind, convert) for key, item in value.items()}
    return value


class RayConnection:
    """How the driver asks the worker of a node; see `tl_devicefix.placement.devices.Connection`.

    Args:
        name: the host's.
        node_id: the node's in Ray, where the worker starts; it is never started again.
        n_gpus: how many GPUs Ray has there, all of which it gets.
        on_loss: called with this and the reason when the worker is lost; returns the error.
    """

    def __init__(
        self,
        name: str,
        node_id: str,
        n_gpus: float,
        on_loss: Callable[[RayConnection, str], HostLost],
    ) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self.name = name
        self._ray = ray
        self._on_loss = on_loss
        self._closed = threading.Event()
        self._n_gpus = n_gpus
        actor = ray.remote(
            num_cpus=0,
            num_gpus=n_gpus,
            max_restarts=0,
            max_concurrency=_CALLS_AT_ONCE,
            concurrency_groups={_PINGS: 1},
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )(WorkerActor)
        self._actor = actor.remote(name, torch.get_num_threads())

    def describe(self, wait: float) -> dict[str, Any]:
        """What the worker says of itself, once it has started.

        Raises:
            HostLost: if its node ends meanwhile, or Ray has not noticed yet that it has ended.
            RuntimeError: if it does not start.
        """
        ray = self._ray
        try:
            description: dict[str, Any] = ray.get(self._actor.describe.remote(), timeout=wait)
        except ray.exceptions.GetTimeoutError:
            in_use = f"; it needs all {self._n_gpus:g} GPUs of the node" if self._n_gpus else ""
            raise RuntimeError(
                f"{self.name} has started no worker for {wait:g} s{in_use}: `ray status` says "
                "what is in use there"
            ) from None
        except ray.exceptions.RayError as error:
            if _NODE_DIED in str(error):
                raise HostLost(f"{self.name} is lost: {_why(error)}", self.name) from error
            raise RuntimeError(f"{self.name} cannot start a worker: {_last_line(error)}") from error
        return description

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the worker, and wait for what it returns."""
        ray = self._ray
        reference = self._actor.call.remote(method, _converted(arguments, torch.Tensor, _Packed))
        try:
            value = ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except ray.exceptions.RayError as error:
            raise self._on_loss(self, _why(error)) from error
        return _converted(value, _Packed, _Packed.unpack)

    def watch(self, timeout: float) -> None:
        """Start a thread that pings the worker; if one is not answered, the worker is lost."""
        threading.Thread(
            target=self._ping, args=(timeout,), daemon=True, name=f"pings to {self.name}"
        ).start()

    def _ping(self, timeout: float) -> None:
        ray = self._ray
        ping = self._actor.ping.options(concurrency_group=_PINGS)
        while not self._closed.wait(_SECONDS_BETWEEN_PINGS):
            if not ray.is_initialized():  # or a ping would start a cluster
                self._on_loss(self, "ray.shutdown() was called")
                return
            try:
                ray.get(ping.remote(), timeout=timeout - _SECONDS_BETWEEN_PINGS)
            except ray.exceptions.GetTimeoutError:
                self._on_loss(self, f"it gave no sign of life for {timeout:g} s")
            except ray.exceptions.RayError as error:
                self._on_loss(self, _why(error))

    def close(self) -> None:
        """End the worker, and whoever waits for it."""
        self._closed.set()
        if self._ray.is_initialized():
            self._ray.kill(self._actor)


def _why(error: Exception) -> str:
    """Why a worker is lost, which Ray tells in a paragraph."""
    return "its node ended, or stands still" if _NODE_DIED in str(error) else "its process ended"


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1]

"""Memory of the host, to which activations are copied beside what devices compute."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from tl_devicefix.offload.copying import copies_beside_computing, module_with_streams


class HostMemory:
    """Memory of the host.

    Where devices have streams, the memory is pinned and copies are on a stream of their own, so
    that the next forward runs meanwhile. Elsewhere a copy is done at once.

    Args:
        devices: from which will be copied.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._pinned = any(map(copies_beside_computing, devices))

    def empty(self, nbytes: int) -> torch.Tensor:
        """Memory as bytes."""
        made = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return made.pin_memory() if self._pinned else made

    def copy(self, here: torch.Tensor, tensor: torch.Tensor) -> None:
        """Start to copy a tensor."""
        with _on_copy_stream(tensor):
            here.copy_(tensor, non_blocking=True)

    def arrivals(self, devices: Iterable[torch.device]) -> list[Any]:
        """What is waited for by who waits for copies that were started from some devices."""
        streams = (device for device in devices if module_with_streams(device) is not None)
        return [_copy_stream(device).record_event() for device in streams]


Group = list[str]
"""Names of tensors that are on one device."""


def by_device(tensors: Mapping[str, torch.Tensor]) -> list[Group]:
    """The names of tensors, by device."""
    groups: dict[torch.device, Group] = {}
    for name, tensor in tensors.items():
        groups.setdefault(tensor.device, []).append(name)
    return list(groups.values())


@contextlib.contextmanager
def _on_copy_stream(tensor: torch.Tensor) -> Any:
    """Within it, copies of a tensor are beside what its device computes, after what made it."""
    module = module_with_streams(tensor.device)
    if module is None:
        yield
        return
    stream = _copy_stream(tensor.device)
    stream.wait_stream(module.current_stream(tensor.device))
    tensor.record_stream(stream)
    with module.stream(stream):
        yield


@functools.cache
def _copy_stream(device: torch.device) -> Any:
    """Of its own: on that of `offload/copying.py`, weights come to the device."""
    return module_with_streams(device).Stream(device)

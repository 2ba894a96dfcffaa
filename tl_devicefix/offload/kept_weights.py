"""What a graph keeps for the backward of an offloaded block: of its weights, the host's.

Without this, a forward with gradients would keep the weights of every block that has visited.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch


def keeping_on_host(
    weights: Iterable[tuple[torch.Tensor, torch.Tensor]], device: torch.device
) -> contextlib.AbstractContextManager[Any]:
    """Within it, autograd keeps host parameters instead of their copies on a device.

    Backward copies each to the device again when it reaches it. torch has one such pair of hooks
    in force at a time, so a user's own, such as `save_on_cpu`, see nothing of what is kept here.

    Args:
        weights: pairs of a copy, and the host's parameter.
        device: where the copies are.
    """
    if not torch.is_grad_enabled():
        return contextlib.nullcontext()
    # No copies in here: a graph also keeps the hooks that it was made with.
    hosts = {_storage(there): (host, there.dtype) for there, host in weights}
    return torch.autograd.graph.saved_tensors_hooks(_Keep(hosts, device), _restore)


def _storage(tensor: torch.Tensor) -> int:
    """What tells storages apart while they exist; views share it."""
    return tensor.untyped_storage()._cdata


class _Keep:
    """Called with each tensor that autograd wants to keep.

    Args:
        hosts: storage of a copy -> the host's parameter, and its dtype.
        device: where the copies are.
    """

    def __init__(
        self, hosts: dict[int, tuple[torch.Tensor, torch.dtype]], device: torch.device
    ) -> None:
        self._hosts = hosts
        self._device = device

    def __call__(self, tensor: torch.Tensor) -> _Kept | _KeptWeight:
        """What to keep."""
        host, dtype = self._hosts.get(_storage(tensor), (None, None))
        if host is None or tensor.dtype != dtype:
            return _Kept(tensor.detach(), tensor._version)
        part = (tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
        return _KeptWeight(host, host._version, self._device, part)


@dataclass(frozen=True)
class _Kept:
    """A tensor that is none of the weights. With hooks, torch leaves it to them to check it."""

    tensor: torch.Tensor
    version: int

    def restore(self) -> torch.Tensor:
        """The tensor, if it has not been changed."""
        _check(self.tensor, self.version)
        return self.tensor


@dataclass(frozen=True)
class _KeptWeight:
    """A weight, or a view of one, that lives on the host."""

    host: torch.Tensor
    version: int
    device: torch.device
    part: tuple[tuple[int, ...], tuple[int, ...], int]
    """Shape, strides and offset, within a copy."""

    @torch.no_grad()
    def restore(self) -> torch.Tensor:
        """A copy on the device, if the weight has not been changed."""
        _check(self.host, self.version)
        there = torch.empty_like(self.host, device=self.device, requires_grad=False)
        # Not non_blocking: the weight may be changed as soon as backward has returned.
        return there.copy_(self.host).as_strided(*self.part)


def _restore(kept: _Kept | _KeptWeight) -> torch.Tensor:
    return kept.restore()


def _check(tensor: torch.Tensor, version: int) -> None:
    """Refuse what has been changed in place, as torch does.

    Raises:
        RuntimeError: in torch's words.
    """
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: {tuple(tensor.shape)} on {tensor.device} is at version {tensor._version}; "
            f"expected version {version} instead"
        )

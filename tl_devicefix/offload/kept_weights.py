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
    """
    if not torch.is_grad_enabled():
        return contextlib.nullcontext()
    # No copies in here: a graph also keeps the hooks that it was made with.
    hosts = {_storage(copy): (host, copy.dtype) for copy, host in weights}

    def keep(tensor: torch.Tensor) -> _Kept | _KeptWeight:
        host, dtype = hosts.get(_storage(tensor), (None, None))
        if host is None or tensor.dtype != dtype:
            return _Kept(tensor.detach(), tensor._version)
        part = (tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
        return _KeptWeight(host, host._version, device, part)

    return torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept.restore())


def _storage(tensor: torch.Tensor) -> int:
    """An identifier of a tensor's live storage, which views share."""
    return tensor.untyped_storage()._cdata


@dataclass(frozen=True)
class _Kept:
    """A tensor that is none of the weights, or the host's parameter of one."""

    tensor: torch.Tensor
    version: int

    def restore(self) -> torch.Tensor:
        """The tensor. With hooks, torch leaves it to them to refuse one that was changed."""
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: {tuple(self.tensor.shape)} on {self.tensor.device} is at "
                f"version {self.tensor._version}; expected version {self.version} instead"
            )
        return self.tensor


@dataclass(frozen=True)
class _KeptWeight(_Kept):
    """A weight, or a view of one, that lives on the host."""

    device: torch.device
    part: tuple[tuple[int, ...], tuple[int, ...], int]
    """Shape, strides and offset, within a copy."""

    @torch.no_grad()
    def restore(self) -> torch.Tensor:
        """A copy on the device, if the weight has not been changed."""
        host = super().restore()
        copy = torch.empty_like(host, device=self.device, requires_grad=False)
        # Not non_blocking: the weight may be changed as soon as backward has returned.
        return copy.copy_(host).as_strided(*self.part)

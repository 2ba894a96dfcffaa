"""The form in which the folding steps see one component's weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

Weights = dict[str, torch.Tensor]
"""One component's weights, by name, all on one device. A step may change it and its tensors."""

ToDevice = Callable[[torch.Tensor], torch.Tensor]
"""What copies a tensor to a device, if it is not there yet."""


def working_dtype(weights: Mapping[str, torch.Tensor], wanted: torch.dtype) -> torch.dtype:
    """The dtype to fold a component in: float32, or wider if any weight or the result is wider."""
    dtype = torch.promote_types(torch.float32, wanted)
    for tensor in weights.values():
        if tensor.is_floating_point():
            dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


class WorkingCopies(dict[str, torch.Tensor]):
    """Weights of which a step gets a private copy, on a device and in a dtype to work in.

    The copy is made when a weight is first read by `[]` or `get`, so what no step reads is not
    copied: `items()` shows it as it was given. Copies keep the layout of what they copy (a
    transposed view stays one); integer and boolean tensors keep their dtype.

    `as_given` has the names of those that no step has read or replaced.

    Args:
        given: one component's weights, on any devices and in any dtypes; never changed.
        device: where to fold them.
        dtype: the dtype to fold in (`working_dtype`).
        to_device: what copies them to `device`; `Tensor.to` by default.
    """

    def __init__(
        self,
        given: Mapping[str, torch.Tensor],
        device: torch.device,
        dtype: torch.dtype,
        to_device: ToDevice | None = None,
    ) -> None:
        super().__init__(given)
        self._to_device = to_device or partial(torch.Tensor.to, device=device)
        self._dtype = dtype
        self.as_given = set(given)

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = super().__getitem__(name)
        if name in self.as_given:
            dtype = self._dtype if tensor.is_floating_point() else tensor.dtype
            there = self._to_device(tensor.detach())  # before it is widened: fewer bytes to carry
            tensor = there.to(dtype, copy=there.device == tensor.device)
            self[name] = tensor
        return tensor

    def get(self, name: str, default: Any = None) -> Any:
        """As `[]`, or the default."""
        if name not in self:
            return default
        return self[name]

    def __setitem__(self, name: str, tensor: torch.Tensor) -> None:
        self.as_given.discard(name)
        super().__setitem__(name, tensor)

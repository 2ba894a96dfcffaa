"""Weights as the folding steps see them, and how results are written into a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

Weights = dict[str, torch.Tensor]
"""One component's weights, by name, all on one device. A step may change it and its tensors."""


def working_dtype(weights: Mapping[str, torch.Tensor], asked: torch.dtype) -> torch.dtype:
    """The dtype to fold a component in: float32, or wider if any weight or the result is wider."""
    dtype = torch.promote_types(torch.float32, asked)
    for tensor in weights.values():
        if tensor.is_floating_point():
            dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


class WorkingCopies(dict[str, torch.Tensor]):
    """Weights of which a step gets a private copy, on a device and in a dtype to work in.

    The copy is made when a weight is first read by `[]` or `get`, so what no step reads is not
    copied: `items()` shows it as it was given. Copies keep the layout of what they copy (a
    transposed view stays one); integer and boolean tensors keep their dtype.

    What it is made from is never changed. `as_given` has the names of those that no step has read
    or replaced.
    """

    def __init__(
        self, weights: Mapping[str, torch.Tensor], device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(weights)
        self._device, self._dtype = device, dtype
        self.as_given = set(weights)

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = super().__getitem__(name)
        if name in self.as_given:
            dtype = self._dtype if tensor.is_floating_point() else tensor.dtype
            moved = tensor.detach().to(self._device)  # before it is widened: fewer bytes to carry
            tensor = moved.to(dtype, copy=moved.device == tensor.device)
            self[name] = tensor
        return tensor

    get: Any = Mapping.get  # a dict's own reads it past `[]`

    def __setitem__(self, name: str, tensor: torch.Tensor) -> None:
        self.as_given.discard(name)
        super().__setitem__(name, tensor)


def write(
    model: nn.Module,
    name: str,
    value: torch.Tensor,
    like: torch.Tensor,
    device: torch.device,
    index: tuple[slice, ...] = (),
) -> None:
    """Write a value, or a part of one, into the parameter or buffer of this name, rounded once.

    A parameter without values gets memory on `device` first, laid out as the weight that it comes
    from: TransformerLens's shapes are mostly transposed views of a checkpoint's, its forward mostly
    transposes them back, and so neither costs a copy. Weights that the model has no place for are
    dropped, as in TransformerLens. The value, on any device and in any dtype, is not aliased; it is
    the part of the parameter at `index`, and `like` is the whole weight as it was given.
    """
    path, _, leaf = name.rpartition(".")
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return
    own = module._parameters.get(leaf, module._buffers.get(leaf))
    if own is None:
        return
    if own.is_meta:
        layout = like if like.shape == own.shape else own
        values = torch.empty_like(layout, dtype=own.dtype, device=device, requires_grad=False)
        own = nn.Parameter(values, requires_grad=own.requires_grad)
        module._parameters[leaf] = own
    part = own.detach()[index]
    # One element may fill a scalar.
    part.copy_(value if value.shape == part.shape else value.reshape(part.shape))

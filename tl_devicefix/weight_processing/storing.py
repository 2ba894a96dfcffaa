"""Write processed values into a model's parameters, rounded once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def write(
    model: nn.Module,
    name: str,
    value: torch.Tensor,
    like: torch.Tensor,
    device: torch.device,
    index: tuple[slice, ...] = (),
    copy: Callable[[torch.Tensor, torch.Tensor], Any] = torch.Tensor.copy_,
) -> None:
    """Write a value, or a part of one, into the parameter or buffer of this name.

    A parameter without values gets memory on `device` first, laid out as the weight that it comes
    from: TransformerLens's shapes are mostly transposed views of a checkpoint's, its forward mostly
    transposes them back, and so neither costs a copy. Weights that the model has no place for are
    dropped, as in TransformerLens.

    Args:
        model: the model, or a component of it.
        name: the parameter's or buffer's name within `model`.
        value: on any device, in any dtype; not aliased.
        like: the whole weight as it was given, for its layout.
        device: where the parameter belongs.
        index: which part of the parameter the value is; all of it by default.
        copy: what copies into a part of the parameter, its first argument.
    """
    held = _held(model, name, like, device)
    if held is not None:
        part = held[index]
        # One element may fill a scalar.
        copy(part, value if value.shape == part.shape else value.reshape(part.shape))


def _held(
    model: nn.Module, name: str, like: torch.Tensor, device: torch.device
) -> torch.Tensor | None:
    path, _, leaf = name.rpartition(".")
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return None
    held: torch.Tensor | None = {**module._buffers, **module._parameters}.get(leaf)
    if held is not None and held.is_meta:
        layout = like if like.shape == held.shape else held
        values = torch.empty_like(layout, dtype=held.dtype, device=device, requires_grad=False)
        held = nn.Parameter(values, requires_grad=held.requires_grad)
        module._parameters[leaf] = held
    return None if held is None else held.detach()

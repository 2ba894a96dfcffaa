"""The form in which the folding steps see one component's weights."""

from __future__ import annotations

import torch

Weights = dict[str, torch.Tensor]
"""One component's weights, by name, all on one device. A step may change it and its tensors."""


def working_dtype(weights: Weights, wanted: torch.dtype = torch.float32) -> torch.dtype:
    """The dtype to fold a component in: float32, or wider if any weight or the result is wider."""
    dtype = torch.promote_types(torch.float32, wanted)
    for tensor in weights.values():
        if tensor.is_floating_point():
            dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def working_copies(
    weights: Weights, device: torch.device, wanted: torch.dtype = torch.float32
) -> Weights:
    """Private copies on `device`, in the dtype that folding works in.

    Never aliases the given tensors: the steps work in place. Integer and boolean tensors keep
    their dtype.

    Args:
        weights: one component's weights, on any devices and in any dtypes.
        device: where to fold them.
        wanted: the dtype that the result will be rounded to.
    """
    dtype = working_dtype(weights, wanted)
    return {
        name: tensor.detach().to(
            device=device,
            dtype=dtype if tensor.is_floating_point() else tensor.dtype,
            copy=True,
            memory_format=torch.contiguous_format,
        )
        for name, tensor in weights.items()
    }

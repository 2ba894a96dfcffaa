"""The form in which the folding steps see one component's weights."""

from __future__ import annotations

import torch

Weights = dict[str, torch.Tensor]
"""One component's weights, by name, all on one device. A step may change it and its tensors."""


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype to fold in: float32, or wider if the weights are wider."""
    return torch.promote_types(dtype, torch.float32)


def working_copies(weights: Weights, device: torch.device) -> Weights:
    """Private copies on `device`, in the dtype that folding works in.

    Never aliases the given tensors: the steps work in place. Integer and boolean tensors keep
    their dtype.
    """
    copies = {}
    for name, tensor in weights.items():
        dtype = working_dtype(tensor.dtype) if tensor.is_floating_point() else tensor.dtype
        copies[name] = tensor.detach().to(
            device=device, dtype=dtype, copy=True, memory_format=torch.contiguous_format
        )
    return copies

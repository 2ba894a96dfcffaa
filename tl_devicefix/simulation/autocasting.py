"""Autocast on simulated devices: operations change dtype as they do on the CPU, for its numbers.

What transformers are made of is here; on CUDA, torch also computes softmax, norms and sums in
float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from tl_devicefix.simulation.machine import DEVICE_TYPE

_IN_LOWER_PRECISION = (
    *("addbmm", "addmm", "baddbmm", "bmm", "linear", "matmul", "mm"),
    *("conv1d", "conv2d", "conv3d", "scaled_dot_product_attention"),
)
_IN_FLOAT32 = ("cross_entropy_loss", "mse_loss", "nll_loss")
_IN_THE_WIDEST = ("cat", "stack")

_KEY: Any = torch._C.DispatchKey.AutocastPrivateUse1  # type: ignore[attr-defined]


def register(library: torch.library.Library, everything_else: torch.library.Library) -> None:
    """Register what autocast does.

    Args:
        library: of aten's operations.
        everything_else: of all namespaces.
    """
    for names, choose in (
        (_IN_LOWER_PRECISION, lambda _: torch.get_autocast_dtype(DEVICE_TYPE)),
        (_IN_FLOAT32, lambda _: torch.float32),
        (_IN_THE_WIDEST, _widest),
    ):
        for name in names:
            operation = getattr(torch.ops.aten, name).default
            library.impl(name, _cast_first(operation, choose), _KEY.name)
    everything_else.fallback(torch.library.fallthrough_kernel, _KEY.name)


def _cast_first(
    operation: torch._ops.OpOverload, choose: Callable[[list[torch.Tensor]], torch.dtype]
) -> Callable[..., Any]:
    """An operation whose floating point operands take a dtype first."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_KEY)):
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if _is_cast(leaf)]
            dtype = choose(tensors)
            args, kwargs = tree_map(
                lambda leaf: leaf.to(dtype) if _is_cast(leaf) else leaf, (args, kwargs)
            )
            return operation(*args, **kwargs)

    return call


def _is_cast(leaf: Any) -> bool:
    return (
        isinstance(leaf, torch.Tensor)
        and leaf.device.type == DEVICE_TYPE
        and leaf.is_floating_point()
        and leaf.dtype != torch.float64
    )


def _widest(tensors: list[torch.Tensor]) -> torch.dtype:
    """The dtype that torch promotes all of them to."""
    dtype = torch.get_autocast_dtype(DEVICE_TYPE)
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype

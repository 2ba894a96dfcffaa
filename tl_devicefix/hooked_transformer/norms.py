"""The norms of a block as functions of their weights, in the installed order of operations."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformer_lens.components import LayerNorm, LayerNormPre, RMSNorm, RMSNormPre

from tl_devicefix.hooked_transformer.hook_points import NORMS, at, is_heard
from tl_devicefix.hooked_transformer.known_blocks import IS_2

PRECISE = (torch.float32, torch.float64)
_N_WEIGHTS = {LayerNorm: 2, RMSNorm: 1, LayerNormPre: 0, RMSNormPre: 0}
"""How many parameters each has; where there are fewer, something else is in place of one."""


def run_norm(norm: Any, x: torch.Tensor, heard: bool = True) -> torch.Tensor:
    """Normalise [..., d_model] by a LayerNorm or RMSNorm, folded or not.

    Args:
        norm: the norm; any other module is called.
        x: what it normalises.
        heard: whether somebody may listen in it.
    """
    cls, weights = type(norm), norm._parameters
    if cls not in NORMS or (heard and is_heard(norm)) or len(weights) != _N_WEIGHTS[cls]:
        output: torch.Tensor = norm(x)
        return output
    dtype = norm.cfg.dtype
    if dtype not in PRECISE:
        x = x.to(torch.float32)
    if cls is LayerNormPre or cls is LayerNorm:
        x = x - x.mean(-1, keepdim=True)
    scale = (x.pow(2).mean(-1, keepdim=True) + number(norm.eps, x)).sqrt()
    if heard:
        scale = at(norm._modules, "hook_scale", scale)
    x = x / scale
    if IS_2 and cls is LayerNorm:
        x = x * weights["w"] + weights["b"]
    if heard:
        x = at(norm._modules, "hook_normalized", x)
    if x.dtype != dtype:
        x = x.to(dtype)
    if weights and not (IS_2 and cls is LayerNorm):
        if weights["w"].device != x.device:
            norm.to(x.device)  # as RMSNorm does where a hook has moved what it normalises
        x = x * weights["w"]
        if cls is LayerNorm:
            x = x + weights["b"]
    return x


def number(value: Any, like: torch.Tensor) -> Any:
    """A number as torch rounds it in operations with a tensor, which spares it making a tensor."""
    if type(like) is torch.Tensor and like.dtype in PRECISE and type(value) is float:
        return _as_tensor(value, like.dtype)
    return value


@functools.lru_cache(maxsize=64)
def _as_tensor(value: float, dtype: torch.dtype) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=dtype)

"""The norms and MLPs of a block as functions of their weights, in the installed order."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformer_lens.components import MLP, LayerNorm, LayerNormPre, RMSNorm, RMSNormPre

from tl_devicefix.attention.implementation import has_hooks
from tl_devicefix.hooked_transformer.known_blocks import (
    IS_2,
    MLPS,
    NORMS,
    call_hook_point,
)

PRECISE = (torch.float32, torch.float64)
_N_WEIGHTS = {LayerNorm: 2, RMSNorm: 1, LayerNormPre: 0, RMSNormPre: 0}
"""How many parameters each has; where there are fewer, something else is in place of one."""


def run_norm(norm: Any, x: torch.Tensor, is_hooked: bool = True) -> torch.Tensor:
    """Normalise [..., d_model] by a LayerNorm or RMSNorm, folded or not."""
    cls, weights = type(norm), norm._parameters
    if cls not in NORMS or (is_hooked and has_hooks(norm)) or len(weights) != _N_WEIGHTS[cls]:
        output: torch.Tensor = norm(x)
        return output
    dtype = norm.cfg.dtype
    if dtype not in PRECISE:
        x = x.to(torch.float32)
    if cls is LayerNormPre or cls is LayerNorm:
        x = x - x.mean(-1, keepdim=True)
    scale = (x.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt()
    if is_hooked:
        scale = call_hook_point(norm._modules, "hook_scale", scale)
    x = x / scale
    if IS_2 and cls is LayerNorm:
        x = x * weights["w"] + weights["b"]
    if is_hooked:
        x = call_hook_point(norm._modules, "hook_normalized", x)
    if x.dtype != dtype:
        x = x.to(dtype)
    if weights and not (IS_2 and cls is LayerNorm):
        if weights["w"].device != x.device:
            norm.to(x.device)  # as RMSNorm does where a hook has moved what it normalises
        x = x * weights["w"]
        if cls is LayerNorm:
            x = x + weights["b"]
    return x


def run_mlp(mlp: Any, x: torch.Tensor, is_hooked: bool = True) -> torch.Tensor:
    """Compute a block's MLP from its normalised input; a mixture of experts is called."""
    cls, modules, weights = type(mlp), mlp._modules, mlp._parameters
    if (
        cls not in MLPS
        or (is_hooked and has_hooks(mlp))
        or "hook_mid" in modules
        or len(weights) != (4 if cls is MLP else 5)  # a tensor in place of a parameter
        or weights["W_in"].device != x.device
    ):
        output: torch.Tensor = mlp(x)
        return output
    W_in, W_out = weights["W_in"], weights["W_out"]
    act_fn = mlp.act_fn
    if cls is MLP:
        pre = _addmm(weights["b_in"], x, W_in)
        if is_hooked:
            pre = call_hook_point(modules, "hook_pre", pre)
        post = act_fn(pre)
    else:
        W_gate = weights["W_gate"]
        pre = torch.matmul(x, W_gate) if IS_2 else F.linear(x, W_gate.T.contiguous())
        if is_hooked:
            pre = call_hook_point(modules, "hook_pre", pre)
        linear = torch.matmul(x, W_in) if IS_2 else F.linear(x, W_in.T.contiguous())
        if is_hooked:
            linear = call_hook_point(modules, "hook_pre_linear", linear)
        post = act_fn(pre) * linear + weights["b_in"]
    if is_hooked:
        post = call_hook_point(modules, "hook_post", post)
    if IS_2 or cls is MLP:
        return _addmm(weights["b_out"], post, W_out)
    return F.linear(post, W_out.T.contiguous(), weights["b_out"])


def _addmm(bias: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """TransformerLens's `batch_addmm`."""
    output = torch.addmm(bias, x.view(-1, x.size(-1)), weight)
    return output.view(*x.shape[:-1], weight.shape[-1])

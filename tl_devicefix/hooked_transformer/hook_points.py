"""Whether somebody listens on a hook point or a module, or stands in its place."""

from __future__ import annotations

from typing import Any

import torch
from transformer_lens.components import (
    MLP,
    Attention,
    GatedMLP,
    GroupedQueryAttention,
    LayerNorm,
    LayerNormPre,
    RMSNorm,
    RMSNormPre,
)
from transformer_lens.hook_points import HookPoint

from tl_devicefix.attention.implementation import HOOKS, looks_away

NORMS = frozenset((LayerNorm, LayerNormPre, RMSNorm, RMSNormPre))
MLPS = frozenset((MLP, GatedMLP))
OWN = frozenset((*NORMS, *MLPS, Attention, GroupedQueryAttention, HookPoint))


def is_heard(module: Any) -> bool:
    """Whether calling a module does more than its class's forward."""
    held = module.__dict__
    return bool(
        held["_forward_hooks"]
        or held["_forward_pre_hooks"]
        or held["_backward_hooks"]
        or held["_backward_pre_hooks"]
        or "forward" in held
    )


def sees(module: Any) -> bool:
    """Whether somebody sees what a module, or one in it, is given or gives."""
    modules = (module, *module._modules.values())
    hooks = (hook for each in modules for name in HOOKS for hook in each.__dict__[name].values())
    return not all(map(looks_away, hooks)) or any(
        "forward" in each.__dict__ or type(each) not in OWN for each in modules
    )


def at(modules: dict[str, Any], name: str, x: torch.Tensor) -> torch.Tensor:
    """An activation as it leaves its hook point, which is called if somebody listens there."""
    point = modules[name]
    return point(x) if is_heard(point) or type(point) is not HookPoint else x

"""Whether anybody listens to what a block's attention would not build, in this very forward."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.nn.modules import module as torch_modules
from transformer_lens.hook_points import HookPoint

F = TypeVar("F", bound=Callable[..., Any])
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# torch's, which are called for every module.
_GLOBAL_HOOKS = tuple(getattr(torch_modules, f"_global{name}") for name in _HOOKS)


_LOOKS_AWAY = "_tl_devicefix_looks_away"


def looking_away(hook: F) -> F:
    """A hook of torch's that notes when a module runs, and not what it is given or gives."""
    setattr(hook, _LOOKS_AWAY, True)
    return hook


def listens(point: Any) -> bool:
    """Whether a hook point does more than to hand on: TransformerLens adds its hooks as torch's."""
    if type(point) is not HookPoint:
        return True  # something that was put in its place
    held = vars(point)
    hooks = [hook for name in _HOOKS for hook in held[name].values()]
    return "forward" in held or not all(hasattr(hook, _LOOKS_AWAY) for hook in hooks)


def why_not(attention: Any) -> str | None:
    """Why a block's attention cannot go without scores now; None if it can.

    Args:
        attention: a module of TransformerLens, with `hook_attn_scores` and `hook_pattern`.
    """
    return why_never(attention) or why_not_now(attention)


def why_never(attention: Any) -> str | None:
    """Why it can not, whoever listens: what the module itself computes."""
    if not hasattr(attention, "attn_scale"):
        return _why_never_of_bridge(attention)
    cfg, scale = attention.cfg, attention.attn_scale
    if cfg.attn_scores_soft_cap > 0:
        return "its scores have a soft cap"
    if getattr(cfg, "use_attention_sinks", False):
        return "it has attention sinks"
    if cfg.positional_embedding_type == "relative_positional_bias":
        return "it has relative position biases"
    if not isinstance(scale, (int, float)) or not 0 < scale < math.inf:
        return f"attn_scale is {scale}"
    return None


def _why_never_of_bridge(attention: Any) -> str | None:
    if not hasattr(attention, "_masked_softmax"):
        return "it is a Bridge of TransformerLens 3"
    if not any(_defined_by(attention, name) in _RECONSTRUCTING for name in _COMPUTING):
        return f"a {type(attention).__name__} computes in its own way"
    wrapped = attention.original_component
    if getattr(wrapped, "attn_logit_softcapping", None) is not None:
        return "its scores have a soft cap"
    if getattr(wrapped, "sinks", None) is not None:
        return "it has attention sinks"
    if getattr(attention, "_reorder_and_upcast_attn", False):
        return "its scores are computed in float32"
    return None


_COMPUTING = ("_reconstruct_attention", "forward")
_RECONSTRUCTING = (
    *("JointQKVAttentionBridge", "JointQKVPositionEmbeddingsAttentionBridge"),
    "PositionEmbeddingsAttentionBridge",
)
"""The classes of TransformerLens whose own code multiplies queries with keys, as is known here."""


def _defined_by(module: Any, name: str) -> str | None:
    """The class that defines the first of `_COMPUTING` that a module has."""
    first = next(each for each in _COMPUTING if hasattr(module, each))
    classes = type(module).__mro__ if name == first else ()
    return next((each.__name__ for each in classes if name in vars(each)), None)


def why_not_now(attention: Any) -> str | None:
    """Why it can not in this forward: somebody listens, or something goes on around it."""
    for name in ("hook_attn_scores", "hook_pattern"):
        if listens(getattr(attention, name)):
            return f"{name} has hooks"
    if any(_GLOBAL_HOOKS):
        return "torch has hooks for every module"
    return why_not_here()


def why_not_here() -> str | None:
    """What torch is doing, that `scaled_dot_product_attention` has no derivatives or rules for."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "within a transform of torch.func"
    if torch.autograd.forward_ad._current_level >= 0:
        return "within forward-mode autograd"
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return "while it is compiled"
    return None

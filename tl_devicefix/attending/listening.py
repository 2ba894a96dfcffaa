"""Whether anybody listens to what a block's attention would not build, in this very forward."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.nn.modules.module import _has_any_global_hook
from transformer_lens.hook_points import HookPoint

from tl_devicefix.attending.masks import is_minus_infinity
from tl_devicefix.hosts.snapshots import HOOKS

F = TypeVar("F", bound=Callable[..., Any])
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
    return "forward" in held or any(_listening(point, name) for name in HOOKS)


def _listening(module: Any, hooks: str) -> bool:
    """Whether a module has such hooks, which see what it is given or gives."""
    return not all(hasattr(hook, _LOOKS_AWAY) for hook in vars(module)[hooks].values())


def why_not(attention: Any) -> str | None:
    """Why a block's attention cannot go without scores now; None if it can.

    Args:
        attention: a module of TransformerLens, with `hook_attn_scores` and `hook_pattern`.
    """
    return why_never(attention) or why_not_now(attention)


def why_never(attention: Any) -> str | None:
    """Why it can not, whoever listens: what the module itself computes."""
    for name in _KNOWN:
        if hasattr(attention, name) and not _is_of_transformer_lens(attention, name):
            return f"its {name} is not TransformerLens's"
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
    if not is_minus_infinity(attention.IGNORE):
        return "its IGNORE is not minus infinity"
    return None


_KNOWN = (
    *("forward", "calculate_attention_scores", "apply_causal_mask", "calculate_z_scores"),
    "_make_causal_mask",
    *("_reconstruct_attention", "_apply_reconstruct_attention_mask", "_masked_softmax"),
    *("_softmax_dropout_pattern", "_scrub_compatibility_pattern_nans", "_process_output"),
)
"""Methods of attention, of either class, that get scores or a pattern."""


def _is_of_transformer_lens(module: Any, method: str) -> bool:
    """Whether nobody has put another method into a module, or written a class that has one."""
    owner = next((each for each in type(module).__mro__ if method in vars(each)), None)
    if owner is None or method in vars(module):
        return False
    made = (owner.__module__, getattr(vars(owner)[method], "__module__", ""))
    return all(each.startswith(("transformer_lens.", "tl_devicefix.")) for each in made)


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
    if not hasattr(attention, "attn_scale") and _listening(attention, "_forward_hooks"):
        return "it has hooks of torch's, which see its pattern"  # a Bridge's gives it too
    if attention.training and _drops_out(attention):
        return "its pattern has dropout"
    if _has_any_global_hook():
        return "torch has hooks for every module"
    return why_not_here()


def _drops_out(attention: Any) -> bool:
    """Whether a Bridge's pattern has dropout in training; a HookedTransformer has none."""
    wrapped = getattr(attention, "original_component", None)
    found = (getattr(wrapped, name, None) for name in ("attn_dropout", "attention_dropout"))
    rates = (getattr(each, "p", each) for each in found)
    return any(isinstance(rate, (int, float)) and rate > 0 for rate in rates)


def why_not_here() -> str | None:
    """What torch is doing, that `scaled_dot_product_attention` has no derivatives or rules for."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "within a transform of torch.func"
    if torch.autograd.forward_ad._current_level >= 0:
        return "within forward-mode autograd"
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return "while it is compiled"
    return None

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
from tl_devicefix.monkeypatch.patch import patches

NORMS = frozenset((LayerNorm, LayerNormPre, RMSNorm, RMSNormPre))
MLPS = frozenset((MLP, GatedMLP))
OWN = frozenset((*NORMS, *MLPS, Attention, GroupedQueryAttention, HookPoint))


def is_heard(module: Any) -> bool:
    """Whether calling a module does more than its class's forward."""
    attributes = module.__dict__
    return bool(
        attributes["_forward_hooks"]
        or attributes["_forward_pre_hooks"]
        or attributes["_backward_hooks"]
        or attributes["_backward_pre_hooks"]
        or "forward" in attributes
    )


def sees(module: Any) -> bool:
    """Whether a hook sees the input or output of a module or of its submodules."""
    modules = (module, *module._modules.values())
    hooks = (
        hook
        for submodule in modules
        for name in HOOKS
        for hook in submodule.__dict__[name].values()
    )
    return not all(map(looks_away, hooks)) or any(
        "forward" in submodule.__dict__ or type(submodule) not in OWN for submodule in modules
    )


def at(modules: dict[str, Any], name: str, x: torch.Tensor) -> torch.Tensor:
    """An activation as it leaves its hook point, which is called if somebody listens there."""
    point = modules[name]
    if type(point) is not HookPoint:
        return point(x)  # type: ignore[no-any-return]
    if not is_heard(point):
        return x
    attributes = point.__dict__
    if (
        "forward" in attributes
        or attributes["_forward_pre_hooks"]
        or attributes["_backward_hooks"]
        or attributes["_backward_pre_hooks"]
        or attributes["_forward_hooks_with_kwargs"]
        or attributes["_forward_hooks_always_called"]
    ):
        return point(x)  # type: ignore[no-any-return]
    # What torch's `Module.__call__` does for these, at a third of its time.
    inputs = (x,)
    for hook in tuple(attributes["_forward_hooks"].values()):
        returned = hook(point, inputs, x)
        if returned is not None:
            x = returned
    return x


@patches(
    "HookedTransformer",
    takes="self direction including_permanent level",
    why="hook points without hooks are left alone, which takes a third of a forward's time",
)
def remove_all_hook_fns(
    self: Any, direction: str = "both", including_permanent: bool = False, level: int | None = None
) -> None:
    """`HookedRootModule.remove_all_hook_fns`, which leaves hook points without hooks alone.

    TransformerLens goes through all of them after each `run_with_hooks` and `run_with_cache`, which
    takes as long as a third of a forward of a small model.
    """
    for point in self.hook_points():
        for one_way, handles in (("fwd", point.fwd_hooks), ("bwd", point.bwd_hooks)):
            if handles and direction in (one_way, "both"):
                point.remove_hooks(one_way, including_permanent=including_permanent, level=level)

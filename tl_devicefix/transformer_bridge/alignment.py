"""Carry what a Bridge's components take across devices, so that all of a block is on its device.

accelerate's own hooks, if the Hugging Face model has them, sit below the Bridge's: with these alone
the input of a block, which users hook, would still be on the device of the block before.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate.hooks import AlignDevicesHook
from torch import nn

from tl_devicefix.dispatch.forward import align
from tl_devicefix.placement.in_use import use
from tl_devicefix.placement.placement import Placement


def settle_bridge(bridge: Any, placement: Placement) -> None:
    """Record a placement that the weights have already, and make the Bridge run over it."""
    bridge.__dict__["placement"] = placement
    use(placement)
    bridge.cfg.device = str(placement.home)
    bridge.cfg.n_devices = len(placement.devices)
    _drop_bound_methods(bridge.original_model)
    align_bridge(bridge, placement)


def _drop_bound_methods(hf_model: nn.Module) -> None:
    """Drop accelerate's own `to` and its like, which are bound to this very model.

    A deep copy's would move this one. The Bridge's `to` sees to several devices by itself.
    """
    for name, value in list(vars(hf_model).items()):
        wrapped = getattr(value, "__wrapped__", None)
        if name != "forward" and getattr(wrapped, "__self__", None) is hf_model:
            del vars(hf_model)[name]


def align_bridge(bridge: Any, placement: Placement) -> None:
    """Make a Bridge run over the devices of `placement`, replacing any earlier alignment."""
    align(bridge, placement, lambda name: False)
    if len(placement.memories) > 1:
        take_inputs_at(bridge.original_model, placement.home)
        _forget_tied_weights(bridge.original_model)


def take_inputs_at(hf_model: nn.Module, home: torch.device) -> None:
    """Have accelerate's outermost hook bring tokens and masks home, and leave logits there."""
    outermost = getattr(hf_model, "_hf_hook", None)
    if isinstance(outermost, AlignDevicesHook) and not outermost.offload:
        outermost.execution_device = home
        outermost.io_same_device = False


def _forget_tied_weights(hf_model: nn.Module) -> None:
    """Have accelerate's hooks let go of tied weights, of which they keep the first for good.

    They bring back with it what they offload; where they offload nothing, it is never used.
    """
    hooks = [getattr(module, "_hf_hook", None) for module in hf_model.modules()]
    aligning = [hook for hook in hooks if isinstance(hook, AlignDevicesHook)]
    if not any(hook.offload for hook in aligning):
        for hook in aligning:
            if hook.tied_params_map:
                hook.tied_params_map.clear()


def register_hooks(bridge: Any) -> None:
    """Have a Bridge know the hook points that its modules have now, as when it was made."""
    bridge.clear_hook_registry()
    bridge._initialize_hook_registry()
    bridge._setup_hook_compatibility()
    bridge._register_all_aliases_recursive()

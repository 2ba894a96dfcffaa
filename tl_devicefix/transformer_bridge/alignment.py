"""Carry what a Bridge's components take across devices, so that all of a block is on its device.

accelerate's own hooks, if the Hugging Face model has them, sit below the Bridge's: with these alone
the input of a block, which users hook, would still be on the device of the block before.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate.hooks import AlignDevicesHook
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from tl_devicefix.dispatch.attached import detach
from tl_devicefix.dispatch.carrying import move
from tl_devicefix.dispatch.forward import HANDLES
from tl_devicefix.dispatch.hooking import let_hooks_be, let_hooks_mix
from tl_devicefix.dispatch.put_in import watch
from tl_devicefix.dispatch.scheduler import going_to
from tl_devicefix.dispatch.skipping import is_skipped
from tl_devicefix.offload.visiting import let_stay, let_visit
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
    unalign_bridge(bridge)
    if len(placement.memories) == 1:
        return
    carriers = {device: CarryAllTo(device) for device in placement.devices}
    modules = dict(bridge.named_modules())
    bridge.__dict__[HANDLES] = [
        modules[component.name].register_forward_pre_hook(
            carriers[component.device], with_kwargs=True
        )
        for component in placement.components
        if component.name in modules
    ]
    take_inputs_at(bridge.original_model, placement.home)
    _forget_tied_weights(bridge.original_model)
    let_visit(bridge, placement)
    bridge.__dict__[HANDLES] += watch(bridge, placement)
    let_hooks_mix(bridge, placement)


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


def unalign_bridge(bridge: Any) -> None:
    """Remove the hooks that `align_bridge` added."""
    for handle in bridge.__dict__.pop(HANDLES, ()):
        handle.remove()
    detach(bridge)
    let_stay(bridge)
    let_hooks_be(bridge)


def register_hooks(bridge: Any) -> None:
    """Have a Bridge know the hook points that its modules have now, as when it was made."""
    bridge.clear_hook_registry()
    bridge._initialize_hook_registry()
    bridge._setup_hook_compatibility()
    bridge._register_all_aliases_recursive()


class CarryAllTo:
    """Forward pre-hook of all components on one device: bring there what they take.

    Hugging Face models hand the same mask and rotary tables to every block: they are copied once,
    not for each block.

    Args:
        device: the components'.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # A tensor -> its copy, and the version that was copied. Entries go with their tensors.
        self._copies = WeakIdKeyDictionary()

    def __call__(
        self, component: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments, on the device."""
        if is_skipped(component):
            return args, kwargs
        with going_to(self.device, component):
            return self._carried(component, args, kwargs)

    def _carried(
        self, component: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        residual = vars(component).get("_start_residual")  # of `start_at_layer`
        if residual is not None:
            component._start_residual = move(residual, self.device)
        first, others = args[:1], args[1:]
        if first:  # the residual stream: each block has its own
            return (move(first[0], self.device), *self._here(others)), self._here(kwargs)
        return (), self._here(kwargs)

    def _here(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._copy(value)
        if type(value) in (tuple, list):
            return type(value)(self._here(each) for each in value)
        if type(value) is dict:
            return {name: self._here(each) for name, each in value.items()}
        return value

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device == self.device:
            return tensor
        if tensor.requires_grad or tensor.is_inference():  # in a graph, or without a version
            return move(tensor, self.device)
        copy, version = self._copies.get(tensor, (None, None))
        if copy is None or version != tensor._version:
            copy, version = move(tensor, self.device), tensor._version
            self._copies[tensor] = copy, version
        return copy

    def __deepcopy__(self, memo: dict[int, Any]) -> CarryAllTo:
        return CarryAllTo(self.device)

    def __reduce__(self) -> Any:
        return CarryAllTo, (self.device,)

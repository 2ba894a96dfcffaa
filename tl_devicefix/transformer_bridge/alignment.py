"""Place and move a Bridge, and carry inputs to the devices of its components.

accelerate's hooks on the Hugging Face model run inside the Bridge's hook points: users would see a
block's input on the previous block's device. So `CarryTo` replaces them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any, TypeVar

import torch
from accelerate.hooks import AlignDevicesHook, ModelHook, remove_hook_from_module
from torch import nn
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.generalized_components import position_embeddings_attention

from tl_devicefix.dispatch.carrying import CarryTo
from tl_devicefix.dispatch.forward import align
from tl_devicefix.dispatch.user_modules import device_of_weights
from tl_devicefix.dispatch.views import View, ViewBuilder
from tl_devicefix.gathering import home_of
from tl_devicefix.monkeypatch.patch import patches
from tl_devicefix.multihost.remote_block import refuse_to_convert
from tl_devicefix.placement.devices import CPU, parameter_bytes, resolve_to_move, with_index
from tl_devicefix.placement.in_use import use
from tl_devicefix.placement.placement import PlacedComponent, Placement, placement_of
from tl_devicefix.transformer_bridge.components import bridge_components

_Moved = TypeVar("_Moved")


def settle_bridge(bridge: TransformerBridge, placement: Placement | None) -> None:
    """Record a placement (None if it is unknown), and make the Bridge run by it."""
    bridge.__dict__["placement"] = placement
    if placement is None:
        return
    use(placement)
    bridge.cfg.device = str(placement.home)
    bridge.cfg.n_devices = len(placement.devices)
    # First: accelerate restores the `forward` that a module had, and `align` wraps some.
    if len(placement.memories) > 1:
        _replace_accelerates_hooks(bridge, placement)
    align(bridge, placement, lambda name: False)  # outputs come home in `forward`


def _replace_accelerates_hooks(bridge: TransformerBridge, placement: Placement) -> None:
    """Remove accelerate's hooks; modules outside of all components get a `CarryTo` instead."""
    hf_model = bridge.original_model
    known = {m for _, component in placement.modules_of(bridge) for m in component.modules()}
    for module in hf_model.modules():
        hook: Any = vars(module).get("_hf_hook")
        if type(hook) is not AlignDevicesHook or hook.offload:
            continue
        if isinstance(vars(module)["forward"], partial):
            remove_hook_from_module(module)
            if vars(module).get("forward") == MethodType(type(module).forward, module):
                del vars(module)["forward"]
        else:  # TransformerLens's own, of a block of T5 or Falcon, which may call accelerate's
            vars(module)["_hf_hook"] = ModelHook()  # does nothing
        device = placement.home if module is hf_model else device_of_weights(module)
        if module not in known and device is not None:
            CarryTo(device).attach(module)


def register_hooks(bridge: TransformerBridge) -> None:
    """Register the hook points of a Bridge's current modules."""
    bridge.clear_hook_registry()
    bridge._initialize_hook_registry()
    bridge._setup_hook_compatibility()
    bridge._register_all_aliases_recursive()


@patches("TransformerBridge", takes="self", why="a dtype keeps the placement")
def to(
    original: Callable[..., _Moved], self: TransformerBridge, *args: Any, **kwargs: Any
) -> _Moved:
    """See `TransformerBridge.to`. A new dtype keeps the placement, and updates its sizes.

    As in TransformerLens, a Bridge on several devices stays there, with a warning. One that has
    offloaded blocks and runs on one device moves entirely, and is no longer offloaded. A number
    is an index of home's device type, or of the accelerator's if home is the CPU.

    Raises:
        ValueError: if there is no device of that number.
    """
    # TransformerLens would silently move a Bridge on several devices to a numbered one.
    if args and type(args[0]) is int:
        args = (resolve_to_move(args[0], home_of(self) or CPU), *args[1:])
    if type(kwargs.get("device")) is int:
        kwargs["device"] = resolve_to_move(kwargs["device"], home_of(self) or CPU)
    asked = {name: value for name, value in kwargs.items() if name != "print_details"}
    refuse_to_convert(self, lambda tensor: tensor.to(*args, **asked))
    moved = original(self, *args, **kwargs)
    placement = placement_of(self)
    if placement is None:
        return moved
    if len(placement.memories) == 1:
        placement = placement_as_it_lies(self)
    else:
        placement = placement.reweighed(self)
        lie_on = {with_index(parameter.device) for parameter in self.parameters()}
        if len(lie_on) == 1 and len(placement.devices) == 1:  # it is on one device again
            placement = placement.gathered_on(lie_on.pop())
    settle_bridge(self, placement)
    return moved


@patches("TransformerBridge", takes="self fn", why="weights of other hosts are not converted")
def _apply(
    self: TransformerBridge, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> nn.Module:
    """Convert the weights, unless some are on other hosts."""
    refuse_to_convert(self, fn)
    return nn.Module._apply(self, fn, recurse)


def placement_as_it_lies(bridge: TransformerBridge) -> Placement | None:
    """Return where a Bridge's weights are; None if one is on meta, or a component is split."""
    placed = []
    for name, module in bridge_components(bridge):
        devices = {with_index(tensor.device) for tensor in module.parameters()}
        if torch.device("meta") in devices or len(devices) > 1:
            return None
        if devices:
            nbytes = sum(parameter_bytes(module))
            placed.append(PlacedComponent(name, nbytes, device=devices.pop()))
    placed.sort(key=lambda component: component.name != "embed")  # the first one's device is home
    return Placement(tuple(placed)) if placed else None


def view_of(bridge: TransformerBridge) -> View[TransformerBridge]:
    """Make a view of a Bridge."""
    builder = ViewBuilder()
    view = View(bridge, builder)
    _register_attention(bridge, builder)
    return view


def _register_attention(bridge: TransformerBridge, builder: ViewBuilder) -> None:
    """Let TransformerLens 3 find the components of the view's attention layers."""
    # The registry maps the id of transformers' attention to the component with the rotary hooks.
    registry = getattr(position_embeddings_attention, "_ATTENTION_BRIDGE_REGISTRY", None)
    if registry is None:
        return
    for module in bridge.modules():
        component = registry.get(id(module))
        if component is not None:
            registry[id(builder.counterpart_of(module))] = builder.counterpart_of(component)

"""Where a Bridge lies, and moving it: over devices from the host, or to another dtype."""

from __future__ import annotations

from typing import Any

import torch

from tl_devicefix.gathering.gathering import home_of
from tl_devicefix.placement.components import ComponentSize
from tl_devicefix.placement.devices import HOST, resolve_to_move, with_index
from tl_devicefix.placement.in_use import use
from tl_devicefix.placement.placement import PlacedComponent, Placement
from tl_devicefix.transformer_bridge.alignment import settle_bridge
from tl_devicefix.transformer_bridge.units import bridge_components


def to(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """See `TransformerBridge.to`. A dtype keeps the placement, which weighs what it then does.

    As in TransformerLens, a Bridge over several devices is not moved to one, with a warning. One
    that runs on one device, with offloaded blocks, is moved whole, and nothing is offloaded then.
    A number is an index of a device of home's type.

    Raises:
        ValueError: if a number is of no device.
    """
    # TransformerLens takes no number for a device: it would move a spread Bridge, and say nothing.
    if args and type(args[0]) is int:
        args = (resolve_to_move(args[0], home_of(self) or HOST), *args[1:])
    if type(kwargs.get("device")) is int:
        kwargs["device"] = resolve_to_move(kwargs["device"], home_of(self) or HOST)
    moved = original(self, *args, **kwargs)
    placement: Placement | None = getattr(self, "placement", None)
    if placement is not None and len(placement.memories) > 1:
        placement = placement.reweighed(sizes_now(self, placement))
        lie_on = {with_index(parameter.device) for parameter in self.parameters()}
        if len(lie_on) == 1 and len(placement.devices) == 1:  # it was moved, and is whole again
            placement = placement.gathered_on(lie_on.pop())
        settle_bridge(self, placement)
    elif placement is not None:
        record_one_device(self, placement_as_it_lies(self))
    return moved


def record_one_device(bridge: Any, placement: Placement | None) -> None:
    """Record where a Bridge lies that is on one device; None if that is not known."""
    bridge.__dict__["placement"] = placement
    if placement is not None:
        use(placement)


def sizes_now(bridge: Any, placement: Placement) -> list[ComponentSize]:
    """What each component of a placement weighs, as the Bridge has it."""
    modules = dict(bridge.named_modules())
    sizes = []
    for component in placement.components:
        module = modules.get(component.name)
        weights, buffers = component.weights, component.buffers
        if module is not None:
            weights = sum(each.nbytes for each in module.parameters())
            buffers = sum(each.nbytes for each in module.buffers())
        sizes.append(ComponentSize(component.name, weights, buffers, gives=component.gives))
    return sizes


def place_bridge(bridge: Any, placement: Placement) -> None:
    """Move each component to its planned device, and the rest home; make the Bridge run over them.

    Args:
        bridge: on the host, without hooks of accelerate's.
        placement: its blocks may be offloaded: only their buffers go to the device.
    """
    hf_model = bridge.original_model
    # By which TransformerLens, and transformers, would think that accelerate offloads to the CPU.
    vars(hf_model).pop("hf_device_map", None)
    modules = dict(bridge.named_modules())
    placed: set[int] = set()
    for component in placement.components:
        module = modules.get(component.name)
        if module is not None:
            _move(module, component.device, component.stored_on, placed)
    _move(hf_model, placement.home, placement.home, placed)
    settle_bridge(bridge, placement)


def _move(
    module: torch.nn.Module, device: torch.device, stored_on: torch.device, placed: set[int]
) -> None:
    """Move what is in a module, and was not moved before, in place."""
    for each in module.modules():
        for parameter in each.parameters(recurse=False):
            if id(parameter) not in placed and parameter.device != stored_on:
                parameter.data = parameter.data.to(stored_on)
            placed.add(id(parameter))
        for name, buffer in each.named_buffers(recurse=False):
            if id(buffer) not in placed:
                each._buffers[name] = buffer.to(device)
                placed.add(id(each._buffers[name]))


def placement_as_it_lies(bridge: Any) -> Placement | None:
    """Where a Bridge's components are, by their weights; None if some have no values there."""
    placed = []
    for name, module in bridge_components(bridge):
        tensors = list(module.parameters())
        devices = {with_index(tensor.device) for tensor in tensors}
        if torch.device("meta") in devices or len(devices) > 1:
            return None
        if devices:
            placed.append(
                PlacedComponent(name, devices.pop(), sum(tensor.nbytes for tensor in tensors))
            )
    embed = [each for each in placed if each.name == "embed"]
    placed = embed + [each for each in placed if each.name != "embed"]
    return Placement(tuple(placed)) if placed else None


def let_pieces_mix(bridge: Any) -> None:
    """Count the devices of a Bridge that divides components as in use, for `mix_devices`.

    It is left as accelerate dispatched it, whose hooks carry what some of its modules take.
    """
    pieces = [
        PlacedComponent(path, with_index(parameter.device), parameter.nbytes)
        for path, module in bridge.original_model.named_modules()
        for parameter in module.parameters(recurse=False)
        if not parameter.is_meta
    ]
    if pieces:
        bridge.__dict__["_pieces"] = Placement(tuple(pieces))  # held for as long as the Bridge
        use(bridge.__dict__["_pieces"])

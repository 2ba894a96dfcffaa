"""The units that a Bridge's weights are processed in, and the modules that get them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tl_devicefix.weight_processing import Weights


@dataclass
class Unit:
    """Some weights that are processed together, and the Bridge's components that they belong to."""

    name: str
    """As a person would call it: "embed", "blocks.3", "unembed"."""
    components: dict[str, nn.Module] = field(default_factory=dict)
    """Prefix of the weights' names -> the Bridge's component."""
    weights: Weights = field(default_factory=dict)
    """By the names of the Bridge's state dict; not copies."""
    places: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Name of a weight -> its component, and its name within that."""


def units(bridge: Any) -> list[Unit]:
    """A Bridge's units: the embeddings and what else there is, each block, the unembedding last."""
    of_component: dict[str, Unit] = {}
    for name, component in bridge_components(bridge):
        unit = Unit("unembed") if name in ("ln_final", "unembed") else Unit(name)
        of_component[name] = next((u for u in of_component.values() if u.name == unit.name), unit)
        of_component[name].components[name] = component
    for name, tensor in bridge.state_dict().items():
        place = _place(_in_bridge(name, bridge), of_component)
        if place is not None:  # others are no weights of the Bridge's components
            of_component[place[0]].weights[name] = tensor
            of_component[place[0]].places[name] = place
    distinct = list({id(unit): unit for unit in of_component.values()}.values())
    return sorted(distinct, key=lambda unit: unit.name == "unembed")


def _place(name: str, components: Mapping[str, Any]) -> tuple[str, str] | None:
    """A weight's component and its name in it: "blocks.3", "attn.q.weight"."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        if ".".join(parts[:end]) in components:
            return ".".join(parts[:end]), ".".join(parts[end:])
    return None


def bridge_components(bridge: Any) -> Iterator[tuple[str, nn.Module]]:
    """A Bridge's components by their names: "embed", "blocks.3", "unembed"."""
    for name, (_, component) in bridge.real_components.items():
        if isinstance(component, list):
            for index, each in enumerate(component):
                yield f"{name}.{index}", each
        else:
            yield name, component


def _in_bridge(name: str, bridge: Any) -> str:
    """A state dict's name by the Bridge's components: some adapters leave Hugging Face's prefix."""
    for component, (path, _) in bridge.real_components.items():
        if path and path != component and name.startswith(f"{path}."):
            return f"{component}.{name[len(path) + 1 :]}"
    return name


def device_of(weights: Mapping[str, torch.Tensor]) -> torch.device | None:
    """Where most of some weights lie, in bytes; None if there are none."""
    held: dict[torch.device, int] = {}
    for tensor in weights.values():
        held[tensor.device] = held.get(tensor.device, 0) + tensor.nbytes
    return max(held, key=lambda device: held[device]) if held else None

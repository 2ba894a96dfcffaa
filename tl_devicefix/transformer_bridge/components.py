"""The components of a Bridge: paths in the Hugging Face model, sizes, processing units."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformer_lens.factories.architecture_adapter_factory import ArchitectureAdapterFactory
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.architecture_adapter import ArchitectureAdapter
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_config_from_hf
from transformers import PretrainedConfig, PreTrainedModel

try:
    from transformer_lens.model_bridge.sources._hf_format import (
        determine_architecture_from_hf_config,
    )
    from transformer_lens.model_bridge.sources.transformers.helpers import (
        get_hf_model_class_for_architecture,
    )
except ImportError:  # TransformerLens 3.9
    from transformer_lens.model_bridge.sources.transformers import (
        determine_architecture_from_hf_config,
        get_hf_model_class_for_architecture,
    )

from tl_devicefix.checkpoints.hub import reading_config
from tl_devicefix.monkeypatch.versions import has_hooked_transformer
from tl_devicefix.placement.placement import REST, ComponentSize, Placement, in_short
from tl_devicefix.weight_processing import Weights


@dataclass(frozen=True)
class Layout:
    """The components of a Bridge, by the paths of their modules in the Hugging Face model."""

    paths: Mapping[str, str]
    """Component ("embed", "blocks.3") -> path ("model.layers.3"), in the order they run."""

    def component_of(self, name: str) -> str:
        """Return the component of a parameter or module of the Hugging Face model."""
        inside = [
            c for c, path in self.paths.items() if name == path or name.startswith(f"{path}.")
        ]
        return max(inside, key=lambda component: len(self.paths[component]), default=REST)

    def sizes(self, hf_model: nn.Module) -> tuple[ComponentSize, ...]:
        """Return each component's size in `hf_model`, whose tensors may be on meta."""
        names: tuple[str, ...] = (*self.paths, REST)
        weights, buffers = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
        # Count duplicates: processing unties a tied unembedding.
        for name, parameter in hf_model.named_parameters(remove_duplicate=False):
            weights[self.component_of(name)] += parameter.nbytes
        for name, buffer in hf_model.named_buffers(remove_duplicate=False):
            buffers[self.component_of(name)] += buffer.nbytes
        unembed = hf_model.get_submodule(self.paths["unembed"]) if "unembed" in self.paths else None
        if isinstance(unembed, nn.Linear) and unembed.bias is None:
            # TransformerLens adds a bias of zeros: a buffer, before 4.0 a parameter.
            added_to = weights if has_hooked_transformer() else buffers
            added_to["unembed"] += unembed.out_features * unembed.weight.itemsize
        if not weights[REST] + buffers[REST]:
            names = names[:-1]
        return tuple(ComponentSize(name, weights[name], buffers[name]) for name in names)

    def in_components(self, device_map: Any, hf_model: nn.Module) -> Any:
        """Return a user's `device_map` with components in place of transformers' modules."""
        if not isinstance(device_map, Mapping):
            return device_map
        modules = dict(hf_model.named_modules())
        named: dict[str, Any] = {}
        apart: list[str] = []
        # The longest decides, and a component before a module.
        for name in sorted(device_map, key=lambda name: (name not in modules, len(str(name)))):
            if not name or name not in modules:  # a component, or a mistake that the plan refuses
                named[name] = device_map[name]
                continue
            inside = [c for c, path in self.paths.items() if f"{path}.".startswith(f"{name}.")]
            if not inside and (whole := self.component_of(name)) != REST:
                raise ValueError(
                    f"device_map names {name!r}, a part of {whole}, but components are not split: "
                    f"name {self.paths[whole]!r}"
                )
            if not inside and next(modules[name].parameters(), None) is not None:
                apart.append(name)
            named |= dict.fromkeys(inside, device_map[name])
        home = named.get("embed", named.get(""))
        for name in apart:  # a map of accelerate's may name it, and place it there
            if device_map[name] != home:
                raise ValueError(
                    f"device_map names {name!r}, which is part of no component, so it stays where "
                    f"embed is: leave it out; the components are {in_short([*self.paths])}"
                )
        return named

    def device_map(self, hf_model: nn.Module, placement: Placement) -> dict[str, str]:
        """Convert a placement to accelerate's `device_map`, in which no path contains another."""
        placed = {path: str(placement.device_of(name)) for name, path in self.paths.items()}
        return dict(_cover("", hf_model, placed, str(placement.home)))


def _cover(
    path: str, module: nn.Module, placed: Mapping[str, str], home: str
) -> Iterator[tuple[str, str]]:
    """Yield the path and the device of each outermost module that is on one device."""
    if path in placed:
        yield path, placed[path]
    elif path and not any(inside.startswith(f"{path}.") for inside in placed):
        yield path, home
    else:
        prefix = f"{path}." if path else ""
        own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        for name, _ in own:  # accelerate wants a device for every tensor
            yield f"{prefix}{name}", home
        for name, child in module.named_children():
            yield from _cover(f"{prefix}{name}", child, placed, home)


def layout_of(hf_model: nn.Module, adapter: ArchitectureAdapter) -> Layout:
    """Find the layout of a Hugging Face model, on meta or real, that no Bridge wraps yet.

    Raises:
        ValueError: if its blocks are not where the adapter expects them, as with some task heads.
    """
    paths: dict[str, str] = {}
    for name, component in adapter.get_component_mapping().items():
        if not component.name:
            continue
        if not getattr(component, "is_list_item", False):
            paths[name] = component.name
            continue
        try:
            blocks = hf_model.get_submodule(component.name)
        except AttributeError as error:
            raise ValueError(
                f"a {type(hf_model).__name__} has no {component.name!r}, where "
                f"{type(adapter).__name__} has its {name}: load the class that has it"
            ) from error
        for index, _ in enumerate(blocks.children()):
            paths[f"{name}.{index}"] = f"{component.name}.{index}"
    # A component within another one, such as T5's position biases in its first block, is on the
    # device of that.
    outer = tuple(f"{path}." for path in paths.values())
    paths = {name: path for name, path in paths.items() if not path.startswith(outer)}
    first = {name: path for name, path in paths.items() if name == "embed"}
    return Layout({**first, **paths})  # home is the first component's device


def empty_hf_model(
    model_class: type[Any], config: PretrainedConfig, dtype: torch.dtype, **kwargs: object
) -> PreTrainedModel:
    """Make a Hugging Face model whose parameters have shapes but no values."""
    make = getattr(model_class, "from_config", None) or model_class._from_config
    called = getattr(config, "_name_or_path", None) or config.model_type
    errors = ArithmeticError, LookupError, RuntimeError, TypeError, ValueError
    with reading_config(called, errors), torch.device("meta"):
        return make(config, dtype=dtype, **kwargs)


def adapter_for(
    config: PretrainedConfig, model_name: str, dtype: torch.dtype
) -> ArchitectureAdapter:
    """Return the adapter that TransformerLens would choose for this transformers config."""
    architecture = determine_architecture_from_hf_config(config)
    cfg = build_bridge_config_from_hf(config, architecture, model_name, dtype)
    return ArchitectureAdapterFactory.select_architecture_adapter(cfg)


def hf_model_class(adapter: ArchitectureAdapter) -> type[Any]:
    """Return the class of transformers that loads an adapter's architecture."""
    return get_hf_model_class_for_architecture(adapter.cfg.architecture)


@dataclass
class Unit:
    """Weights that are processed together, and the Bridge's components that have them."""

    name: str
    """The unit's name in messages: "embed", "blocks.3", "unembed"."""
    components: dict[str, nn.Module] = field(default_factory=dict)
    """Prefix of the weights' names -> the Bridge's component."""
    weights: Weights = field(default_factory=dict)
    """The weights by their names in the Bridge's state dict; not copies."""
    places: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Weight -> its component, and its name within that."""


def units(bridge: TransformerBridge) -> list[Unit]:
    """Return a unit for each component of a Bridge; ln_final is in the unembedding's, the last."""
    found: dict[str, Unit] = {}
    unit_by_component: dict[str, Unit] = {}
    for name, component in bridge_components(bridge):
        called = "unembed" if name == "ln_final" else name
        unit_by_component[name] = found.setdefault(called, Unit(called))
        unit_by_component[name].components[name] = component
    for name, tensor in bridge.state_dict().items():
        parts = _in_bridge(name, bridge).split(".")
        ends = range(len(parts) - 1, 0, -1)
        splits = ((".".join(parts[:end]), ".".join(parts[end:])) for end in ends)
        place = next((split for split in splits if split[0] in unit_by_component), None)
        if place is not None:  # some weights belong to no component
            unit_by_component[place[0]].weights[name] = tensor
            unit_by_component[place[0]].places[name] = place
    return sorted(found.values(), key=lambda unit: unit.name == "unembed")


def bridge_components(bridge: TransformerBridge) -> Iterator[tuple[str, nn.Module]]:
    """Yield a Bridge's components with their names: "embed", "blocks.3", "unembed"."""
    for name, (_, component) in bridge.real_components.items():  # (path, module or blocks)
        if isinstance(component, list):
            for index, block in enumerate(component):
                yield f"{name}.{index}", block
        else:
            yield name, component


def _in_bridge(name: str, bridge: TransformerBridge) -> str:
    """Return a weight's name in the Bridge; some state dicts have Hugging Face's prefixes."""
    for component, (path, _) in bridge.real_components.items():
        if path and path != component and name.startswith(f"{path}."):
            return f"{component}.{name[len(path) + 1 :]}"
    return name

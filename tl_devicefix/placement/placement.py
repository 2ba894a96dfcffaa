"""`Placement`: where each component of a model is, and its size in bytes.

Loading, routing, moving and reporting all read the same `Placement`. `deciding.py` makes it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import nn

from tl_devicefix.errors import did_you_mean
from tl_devicefix.placement.devices import (
    CPU,
    DeviceLike,
    has_slash,
    others,
    parameter_bytes,
    resolve,
)
from tl_devicefix.placement.elsewhere import Elsewhere, is_elsewhere
from tl_devicefix.placement.memory import format_table, gib

REST = "rest"
"""The component of a Bridge's modules that its adapter does not name; it is on home."""

VISITING = 2
"""Offloaded blocks on a device at a time: one computes, and the next is being copied there."""

_HOOKS_AT_HOME = ("hook_tokens", "hook_embed", "hook_pos_embed", "hook_unembed")
"""The model's own hook points, which are in no component: all are at home."""


@dataclass(frozen=True)
class ComponentSize:
    """A component of a model, which is placed as a whole, and its size in bytes."""

    name: str
    weights: int
    buffers: int = 0
    shared: str | None = None
    """Blocks on one device with equal `shared` have one copy of their buffers."""


@dataclass(frozen=True, kw_only=True)
class PlacedComponent(ComponentSize):
    """One component, with the device that runs it, and its size in bytes."""

    device: torch.device
    offloaded: bool = False
    """True if its weights are in CPU memory, with a copy on its device while it runs."""

    @property
    def stored_on(self) -> torch.device:
        """The device of its weights while it does not run."""
        return CPU if self.offloaded else self.device


@dataclass(frozen=True, repr=False)
class Placement:
    """Where each component of a model is. You cannot change it; printing it shows a table."""

    components: tuple[PlacedComponent, ...]
    others: Elsewhere = field(default_factory=others, compare=False)
    """Finds devices of other processes by name."""

    def __deepcopy__(self, memo: object) -> Placement:
        return self  # immutable, so a copied model can share it

    @property
    def device_map(self) -> dict[str, torch.device]:
        """Component name -> device, in the order the components run. A fresh dict at each read."""
        return {component.name: component.device for component in self.components}

    @cached_property
    def _by_name(self) -> dict[str, PlacedComponent]:
        return {component.name: component for component in self.components}

    @property
    def home(self) -> torch.device:
        """The first component's device: tokens, logits, losses and cached activations are here."""
        return self.components[0].device

    @property
    def here(self) -> Placement:
        """The same placement without components that are elsewhere."""
        return self if self._here is None else self._here

    # None means `self`: a placement that refers to itself would outlive its model, and
    # `in_use.py` counts those that are alive.
    @cached_property
    def _here(self) -> Placement | None:
        own = tuple(c for c in self.components if not is_elsewhere(c.device))
        return None if own == self.components else Placement(own, self.others)

    @property
    def local_part(self) -> Placement:
        """The part of the placement that concerns this process: on a worker, its own blocks."""
        return self.here if is_elsewhere(self.home) else self

    @cached_property
    def devices(self) -> tuple[torch.device, ...]:
        """The devices in use, home first, then in the order that the residual stream visits."""
        return tuple(dict.fromkeys(component.device for component in self.components))

    @cached_property
    def memories(self) -> tuple[torch.device, ...]:
        """The devices whose memory has weights: those in use, and "cpu" if blocks are offloaded."""
        stored = (component.stored_on for component in self.components)
        return tuple(dict.fromkeys((*self.devices, *stored)))

    def device_of(self, name: str) -> torch.device:
        """The device on which a component, or anything in one, runs.

        Args:
            name: of a component ("blocks.3"), or of a parameter, buffer, module or hook in one
                ("blocks.3.hook_resid_post"). The model's own hooks, such as "hook_embed", are in
                no component, and run at home.

        Returns:
            The device where it runs.

        Raises:
            KeyError: if the name belongs to no component of this model.
        """
        return self._component(name).device

    def read_at(self, name: str) -> torch.device:
        """Return a component's device, or home if that device is elsewhere."""
        device = self.device_of(name)
        return self.home if is_elsewhere(device) else device

    def device_for(self, name: str, is_weight: bool = False) -> torch.device:
        """Return where `name` runs or, as a weight, is stored; home if it is in no component."""
        component = self._by_name.get(component_of(name), self.components[0])
        return component.stored_on if is_weight else component.device

    def stored_on(self, name: str) -> torch.device:
        """The device of a component's weights while it does not run.

        Args:
            name: of a component, or of a parameter, buffer, module or hook in one.

        Returns:
            The device; "cpu" for an offloaded block.

        Raises:
            KeyError: if the name belongs to no component of this model.
        """
        return self._component(name).stored_on

    def _component(self, name: str) -> PlacedComponent:
        """Return the component that a name is in; for the model's own hooks, the one at home."""
        if name in _HOOKS_AT_HOME:
            return self.components[0]
        component = component_of(str(name))
        if component not in self._by_name:
            # Suggest nothing for "blocks" and "blocks.99": the list says enough.
            kinds = {name.partition(".")[0] for name in self._by_name}
            is_listed = component.partition(".")[0] in kinds
            meant = "" if is_listed else did_you_mean(component, self._by_name)
            raise KeyError(
                f"{name!r} is in no component of this model, which has "
                f"{in_short(list(self._by_name))}{meant}"
            )
        return self._by_name[component]

    def bytes_on(self, device: DeviceLike) -> int:
        """Bytes of weights and buffers that are planned for a device.

        Where offloaded blocks run, the two largest are included: two may be there at a time.

        Args:
            device: an index, a name such as "cuda:1", or a torch.device.

        Returns:
            Bytes.

        Raises:
            ValueError: if it is neither a device in use nor one that this machine has.
        """
        device = self._device(device)
        running = [c for c in self.components if c.device == device]
        stored = sum(c.weights for c in self.components if c.stored_on == device)
        return stored + sum(self._visiting(device)) + shared_buffer_bytes(running)

    def _device(self, named: DeviceLike) -> torch.device:
        """Resolve a device. One in use is found by name: a simulated one may no longer exist."""
        if has_slash(named):
            return self.others.find(str(named))
        for memory in self.memories:
            # Compare texts: an index, which is of this host, may come as "1". The CPU has none.
            index = None if is_elsewhere(memory) else memory.index
            if named in (memory, str(memory)) or str(named) == str(index) != "None":
                return memory
        return resolve(named, self.home)

    def _visiting(self, device: torch.device) -> list[int]:
        """Return the sizes of the largest offloaded blocks that may be on a device at a time."""
        weights = (c.weights for c in self.components if c.offloaded and c.device == device)
        return sorted(weights, reverse=True)[:VISITING]

    def gathered_on(self, device: torch.device) -> Placement:
        """Return the same components, all on one device and none offloaded."""
        gathered = (
            replace(component, device=device, offloaded=False) for component in self.components
        )
        return Placement(tuple(gathered), self.others)

    def reweighed(self, model: nn.Module) -> Placement:
        """Return this placement with the present sizes of a model's components."""
        weighed = dict(self._by_name)
        for component, module in self.modules_of(model):
            weights = sum(parameter_bytes(module))
            buffers = sum(tensor.nbytes for tensor in module.buffers())
            weighed[component.name] = replace(component, weights=weights, buffers=buffers)
        return Placement(tuple(weighed.values()), self.others)

    def modules_of(self, model: nn.Module) -> Iterator[tuple[PlacedComponent, nn.Module]]:
        """Yield the components that a model has, each with its module."""
        modules = dict(model.named_modules())
        for component in self.components:
            if component.name in modules:  # a user may have cut `model.blocks`
                yield component, modules[component.name]

    def __repr__(self) -> str:
        rows = [("device", "components", "weights", "total")]
        for memory in self.memories:
            weights = gib(sum(c.weights for c in self.components if c.stored_on == memory))
            total = gib(self.bytes_on(memory))
            rows.append((self.label(memory), self.components_on(memory), weights, total))
        everything = sum(self.bytes_on(memory) for memory in self.memories)
        rows.append(("total", "", gib(sum(c.weights for c in self.components)), gib(everything)))
        return format_table(rows, "<<>>")

    def label(self, memory: torch.device) -> str:
        """Return a device's name, and role if it has one: "cuda:0 (home)", "cpu (offloaded)"."""
        name = self.others.name_of(memory)
        if memory == self.home:
            return f"{name} (home)"
        is_offload = memory == CPU and any(c.offloaded for c in self.components)
        return f"{name} (offloaded)" if is_offload else name

    def components_on(self, memory: torch.device) -> str:
        """Return the components in a memory: "blocks.0-2 + 2 visiting"; "blocks.3 -> cuda:0".

        The arrow points to the device that runs offloaded blocks.
        """
        residents = [c.name for c in self.components if not c.offloaded and c.device == memory]
        visiting = len(self._visiting(memory))
        held = [in_short(residents) + (f" + {visiting} visiting" if visiting else "")]
        for device in self.devices if memory == CPU else ():
            visitors = [c.name for c in self.components if c.offloaded and c.device == device]
            held.append(f"{in_short(visitors)} -> {device}" if visitors else "")
        return "; ".join(filter(None, held))


def placement_of(model: object) -> Placement | None:
    """Return a model's placement; None if it was built on one device."""
    return getattr(model, "placement", None)


def in_short(names: Sequence[str]) -> str:
    """Shorten ["embed", "blocks.0", "blocks.1", "blocks.3"] to "embed, blocks.0-1, 3"."""
    parts = []
    for kind, group in itertools.groupby(names, lambda name: name.rpartition(".")[0]):
        numbers = [name.rpartition(".")[2] for name in group]
        if kind:  # within a run, number minus position is constant
            by_run = itertools.groupby(enumerate(map(int, numbers)), lambda pair: pair[1] - pair[0])
            runs = [[number for _, number in run] for _, run in by_run]
            numbers = [f"{run[0]}-{run[-1]}" if run[1:] else f"{run[0]}" for run in runs]
            numbers[0] = f"{kind}.{numbers[0]}"
        parts += numbers
    return ", ".join(parts)


def component_of(name: str) -> str:
    """Return the component of a parameter or buffer: "blocks.3" for "blocks.3.attn.W_Q"."""
    parts = name.split(".")
    return ".".join(parts[:2]) if names_block(name) else parts[0]


def names_block(name: str) -> bool:
    """Return True for a block, or a name within one.

    Other components (embed, pos_embed, ln_final, unembed) are at home, unless a device_map places
    them.
    """
    return name.partition(".")[2].partition(".")[0].isdecimal()


def shared_buffer_bytes(on_one_device: Sequence[ComponentSize]) -> int:
    """Return the bytes of buffers that components on one device hold, shared ones counted once."""
    copies = {component.shared or component.name: component.buffers for component in on_one_device}
    return sum(copies.values())

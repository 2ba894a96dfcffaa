"""Where each component of a model lives: `plan(...)` decides it, `Placement` records it.

Loading, routing, moving and reporting all read the same `Placement`. Its vocabulary is
accelerate's: `device_map`, `max_memory`, `n_devices`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from tl_devicefix.balance import balanced, fits, sequential
from tl_devicefix.components import ComponentSize, component_of, is_block, shared_once
from tl_devicefix.devices import (
    HOST,
    DeviceLike,
    all_from,
    consecutive,
    default_device,
    resolve,
    with_index,
)
from tl_devicefix.fitting import MaxMemory, capacity, check_fit, check_max_memory, gib
from tl_devicefix.offloading import VISITING, Share, may_offload, rooms_to_fill, shares
from tl_devicefix.weighing import weigh

DeviceMap = str | int | torch.device | Mapping[str, DeviceLike]
"""A strategy ("auto", "balanced", "sequential"), one device, or components -> devices."""

STRATEGIES = ("auto", "balanced", "sequential")


@dataclass(frozen=True)
class PlacedComponent:
    """One component, where it runs and lives, and what it weighs (bytes)."""

    name: str
    device: torch.device
    weights: int
    buffers: int = 0
    shared: str | None = None
    """Blocks on one device that name the same here hold their buffers together, in one copy."""
    offloaded: bool = False
    """Whether its weights live in host memory, and visit its device while it runs."""

    @property
    def stored_on(self) -> torch.device:
        """Where its weights are while it does not run."""
        return HOST if self.offloaded else self.device


@dataclass(frozen=True, repr=False)
class Placement:
    """Where each component of a model lives. Immutable; printing it shows a table."""

    components: tuple[PlacedComponent, ...]

    @property
    def device_map(self) -> dict[str, torch.device]:
        """Component name -> device, in the order the components run. A fresh dict at each read."""
        return dict(self._device_by_name)

    @cached_property
    def _device_by_name(self) -> dict[str, torch.device]:
        return {component.name: component.device for component in self.components}

    @property
    def home(self) -> torch.device:
        """The device of `embed`: tokens, logits, losses and everything gathered are here."""
        return self.components[0].device

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The devices in use, home first, then in the order that the residual stream visits."""
        return tuple(dict.fromkeys(component.device for component in self.components))

    @cached_property
    def memories(self) -> tuple[torch.device, ...]:
        """The devices in use, and the host if blocks are offloaded to it: where weights live."""
        stored = (component.stored_on for component in self.components)
        return tuple(dict.fromkeys((*self.devices, *stored)))

    def device_of(self, name: str) -> torch.device:
        """The device of a component, parameter or buffer, by name; where it runs, if offloaded.

        Raises:
            KeyError: if the name belongs to no component of this model.
        """
        return self._device_by_name[component_of(name)]

    def device_for(self, name: str, of_weights: bool = False) -> torch.device:
        """Where anything in the model is, by name: what is in no component is at home.

        Args:
            name: of a parameter, a buffer or a module.
            of_weights: where the weights live, which differs for blocks that are offloaded.
        """
        devices = self._stored_by_name if of_weights else self._device_by_name
        return devices.get(component_of(name), self.home)

    def stored_on(self, name: str) -> torch.device:
        """Where a component's weights are while it does not run, by the name of any of them.

        Raises:
            KeyError: if the name belongs to no component of this model.
        """
        return self._stored_by_name[component_of(name)]

    @cached_property
    def _stored_by_name(self) -> dict[str, torch.device]:
        return {component.name: component.stored_on for component in self.components}

    def bytes_on(self, device: DeviceLike) -> int:
        """Bytes of weights and buffers planned for a device: 1, "cuda:1" or a torch.device.

        With offloaded blocks, this has room for two: the one that computes and the next one.
        """
        if isinstance(device, int):
            device = torch.device(self.home.type, device)
        device = with_index(torch.device(device))
        running = [c for c in self.components if c.device == device]
        stored = sum(c.weights for c in self.components if c.stored_on == device)
        return stored + sum(self._visiting(device)) + shared_once(running)

    def _visiting(self, device: torch.device) -> list[int]:
        """Bytes of each offloaded block that may be on a device together with the others."""
        weights = (c.weights for c in self.components if c.offloaded and c.device == device)
        return sorted(weights, reverse=True)[:VISITING]

    def gathered_on(self, device: torch.device) -> Placement:
        """The same components, all on one device, none offloaded."""
        return Placement(tuple(replace(c, device=device, offloaded=False) for c in self.components))

    def reweighed(self, sizes: Sequence[ComponentSize]) -> Placement:
        """The same devices, with these sizes of the components."""
        known = {component.name: component for component in self.components}
        return Placement(
            tuple(
                _placed(size, known[size.name].device, known[size.name].offloaded) for size in sizes
            )
        )

    def __repr__(self) -> str:
        rows = [("device", "components", "weights", "total")]
        for memory in self.memories:
            weights = gib(sum(c.weights for c in self.components if c.stored_on == memory))
            total = gib(self.bytes_on(memory))
            rows.append((self._label(memory), self._held_in(memory), weights, total))
        everything = sum(self.bytes_on(memory) for memory in self.memories)
        rows.append(("total", "", gib(sum(c.weights for c in self.components)), gib(everything)))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        return "\n".join(
            f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:>{widths[2]}}  "
            f"{row[3]:>{widths[3]}}".rstrip()
            for row in rows
        )

    def _label(self, memory: torch.device) -> str:
        if memory == self.home:
            return f"{memory} (home)"
        offloaded = memory == HOST and any(c.offloaded for c in self.components)
        return f"{memory} (offloaded)" if offloaded else str(memory)

    def _held_in(self, memory: torch.device) -> str:
        """What lives there, and who visits: "blocks.0-2 + 2 visiting", "blocks.3, 5 -> cuda:0"."""
        residents = [c.name for c in self.components if not c.offloaded and c.device == memory]
        visiting = len(self._visiting(memory))
        held = [in_short(residents) + (f" + {visiting} visiting" if visiting else "")]
        for device in self.devices if memory == HOST else ():
            visitors = [c.name for c in self.components if c.offloaded and c.device == device]
            held.append(f"{in_short(visitors)} -> {device}" if visitors else "")
        return "; ".join(filter(None, held))


def _placed(size: ComponentSize, device: torch.device, offloaded: bool = False) -> PlacedComponent:
    return PlacedComponent(size.name, device, size.weights, size.buffers, size.shared, offloaded)


def in_short(names: Sequence[str]) -> str:
    """["embed", "blocks.0", "blocks.1", "blocks.2", "blocks.4"] -> "embed, blocks.0-2, 4"."""
    runs: list[list[str]] = []
    for name in names:
        previous = runs[-1][-1] if runs else ""
        follows = is_block(name) and name.partition(".")[0] == previous.partition(".")[0]
        if follows and _number(name) == _number(previous) + 1:
            runs[-1].append(name)
        else:
            runs.append([name])
    parts: list[str] = []
    for before, run in zip([[""], *runs], runs):
        goes_on = is_block(run[0]) and run[0].partition(".")[0] == before[0].partition(".")[0]
        first = str(_number(run[0])) if goes_on else run[0]
        parts.append(first if len(run) == 1 else f"{first}-{_number(run[-1])}")
    return ", ".join(parts)


def _number(block: str) -> int:
    return int(block.rpartition(".")[2])


def plan(
    config_or_model_name: Any,
    n_devices: int | None = None,
    device: DeviceLike | None = None,
    device_map: DeviceMap | None = None,
    max_memory: MaxMemory | None = None,
    dtype: torch.dtype | str | None = None,
) -> Placement:
    """Decide where each component of a model lives, without allocating anything.

    The blocks lie in contiguous ranges over the home device and the ones after it. Home also
    carries the embeddings, the final norm and the unembedding, so it gets fewer blocks; a device
    with more free memory gets more. Blocks may be offloaded: they live in host memory, and their
    weights visit the device that runs them.

    Args:
        config_or_model_name: a HookedTransformerConfig, or whatever `from_pretrained` takes as a
            model name (a name TransformerLens knows, or a local checkpoint directory). The sizes
            of common models are known, so that the hub is not asked for their configs. With
            TransformerLens 4: a transformers config, or what `boot_transformers` takes.
        n_devices: over how many devices to spread the blocks; 1 if nothing else is said.
        device: the home device; the others are those that follow it. "cuda:2" with `n_devices=2`
            means cuda:2 and cuda:3.
        device_map: instead of `n_devices`: "balanced" or "auto" (every device there is, evenly),
            "sequential" (fill each before the next), one device, or a dict from components
            ("embed", "blocks.3", "unembed") or prefixes ("blocks", "") to devices. Blocks on
            "cpu" are offloaded if embed is elsewhere: they run where the block before them does.
        max_memory: the most to use of each device, e.g. `{0: "20GiB", 1: "40GiB"}`. A strategy
            uses the named devices only. With "cpu" in it, blocks that do not fit are offloaded.
        dtype: the dtype to weigh the parameters in; by default the config's. Norms are weighed too,
            which a model that is loaded with `fold_ln=True` no longer has.

    Raises:
        ValueError: one sentence saying what does not fit together and what to do.
    """
    sizes, weighed_in = weigh(config_or_model_name, dtype)
    placement = decide(sizes, n_devices, device, device_map, max_memory)
    check_fit(placement, max_memory, weighed_in)
    return placement


def decide(
    sizes: Sequence[ComponentSize],
    n_devices: int | None = None,
    device: DeviceLike | None = None,
    device_map: DeviceMap | None = None,
    max_memory: MaxMemory | None = None,
) -> Placement:
    """As `plan`, for components of these sizes, whether or not they fit.

    Raises:
        ValueError: if the arguments do not fit together.
    """
    check_max_memory(max_memory)
    if device_map is not None and n_devices not in (None, 1):
        raise ValueError(
            f"both device_map={device_map!r} and n_devices={n_devices} are given: device_map "
            "already says which devices to use, so leave n_devices out"
        )
    if n_devices is not None and not isinstance(n_devices, int):
        raise ValueError(f"n_devices={n_devices!r} is no number of devices: give an int")
    if not isinstance(device_map, str | int | torch.device | Mapping | None):
        raise ValueError(
            f"device_map={device_map!r} is none of a strategy ({', '.join(STRATEGIES)}), a device "
            "and a dict from components to devices"
        )
    if device_map is not None and device_map not in STRATEGIES:
        named = device_map if isinstance(device_map, Mapping) else _whole_on(device_map)
        placement = _from_dict(sizes, named, device)
        _warn_of_unused(max_memory, placement.memories)
        return placement
    home = default_device() if device is None else resolve(device)
    devices = _devices_to_use(home, n_devices, device_map, max_memory)
    offloads = may_offload(home, max_memory)
    _warn_of_unused(max_memory, [*devices, HOST] if offloads else devices)
    # A device that may hold nothing is left out; home is not, so that what it lacks is reported.
    devices = [d for d in devices if d == home or capacity(d, max_memory) != 0]
    capacities = [capacity(d, max_memory) for d in devices]
    if device_map == "sequential":
        counts = sequential(sizes, capacities)
    else:
        counts = balanced(sizes, capacities)
    on_each = [Share(count) for count in counts]
    if offloads and not fits(sizes, counts, capacities):
        on_each = shares(sizes, rooms_to_fill(devices, max_memory))
    return _contiguous(sizes, devices, on_each)


def _devices_to_use(
    home: torch.device,
    n_devices: int | None,
    strategy: DeviceMap | None,
    max_memory: MaxMemory | None,
) -> list[torch.device]:
    """The devices to spread over: `n_devices` from home on, or all that a strategy may use."""
    if strategy is None:
        if n_devices is not None and n_devices < 1:
            raise ValueError(f"n_devices={n_devices} must be at least 1")
        return consecutive(home, n_devices or 1)
    if max_memory is not None:
        # As accelerate does: only the devices that are named may be used.
        named = {resolve(key) for key in max_memory if key != "disk"}
        devices = [d for d in all_from(home) if d in named]
        if not devices:
            raise ValueError(f"max_memory={dict(max_memory)!r} names no {home.type!r} device")
        return devices
    return all_from(home)


def _warn_of_unused(max_memory: MaxMemory | None, devices: Sequence[torch.device]) -> None:
    named = {key if key == "disk" else str(resolve(key)) for key in max_memory or ()}
    unused = named - set(map(str, devices))
    if unused:
        logging.warning(
            "max_memory names %s, where nothing is placed: only %s may be used; n_devices or "
            "device_map='auto' says to use more.",
            ", ".join(sorted(unused)),
            ", ".join(map(str, devices)),
        )


def _contiguous(
    sizes: Sequence[ComponentSize], devices: Sequence[torch.device], on_each: Sequence[Share]
) -> Placement:
    of_block = [
        (device, position in share.offloaded)
        for device, share in zip(devices, on_each)
        for position in range(share.blocks)
    ]
    placed = []
    for size in sizes:
        where = (devices[0], False) if not is_block(size.name) else of_block.pop(0)
        placed.append(_placed(size, *where))
    return Placement(tuple(placed))


def _from_dict(
    sizes: Sequence[ComponentSize], device_map: Mapping[str, DeviceLike], home: DeviceLike | None
) -> Placement:
    """The placement that a user's dict asks for: the longest matching prefix decides."""
    names = [size.name for size in sizes]
    for key in device_map:
        if not any(_is_prefix(key, name) for name in names):
            raise ValueError(
                f"device_map names {key!r}, which is no component of this model; it has "
                f"{in_short(names)} (prefixes such as 'blocks', or '' for all, are fine)"
            )
    placed, missing = [], []
    for size in sizes:
        keys = [key for key in device_map if _is_prefix(key, size.name)]
        if not keys and not _must_be_named(size.name):
            keys = ["embed"]
        if not keys:
            missing.append(size.name)
            continue
        device = resolve(device_map[max(keys, key=len)])
        if device.type == "meta":
            raise ValueError(f"device_map puts {size.name} on 'meta', which holds no values")
        placed.append(_placed(size, device))
    if missing:
        raise ValueError(
            f"device_map says nothing of {in_short(missing)}: give each component a device, or "
            "use device_map='balanced'"
        )
    placement = Placement(_run_where_others_do(placed))
    if home is not None and resolve(home) != placement.home:
        raise ValueError(
            f"device={str(home)!r} is not where device_map puts embed ({placement.home}): embed "
            "decides the home device, so leave device out"
        )
    return placement


def _run_where_others_do(placed: Sequence[PlacedComponent]) -> tuple[PlacedComponent, ...]:
    """Offload the blocks that are on the CPU, unless home is: each runs where the last block did.

    Before the first block that is on a device, they run where that does.
    """
    home = placed[0].device
    on_device = [c for c in placed if is_block(c.name) and c.device != HOST]
    device = on_device[0].device if on_device else home
    running = []
    for component in placed:
        if not is_block(component.name) or home == HOST:
            running.append(component)
        elif component.device == HOST:
            running.append(replace(component, device=device, offloaded=True))
        else:
            device = component.device
            running.append(component)
    return tuple(running)


def _whole_on(device: DeviceLike) -> dict[str, DeviceLike]:
    try:
        return {"": resolve(device)}
    except ValueError as error:
        raise ValueError(
            f"device_map={device!r} is neither a device ({error}) nor one of "
            f"{', '.join(map(repr, STRATEGIES))}"
        ) from error


def _must_be_named(name: str) -> bool:
    """Whether a map has to say where a component is; others are small, and go with `embed`.

    Such as the rotary embedding, which a Bridge has as a component, and HookedTransformer has not.
    """
    return is_block(name) or name in ("embed", "pos_embed", "ln_final", "unembed")


def _is_prefix(key: str, name: str) -> bool:
    return key == "" or name == key or name.startswith(f"{key}.")

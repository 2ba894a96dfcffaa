"""Where each component of a model lives: `plan(...)` decides it, `Placement` records it.

Loading, routing, moving and reporting all read the same `Placement`. Its vocabulary is
accelerate's: `device_map`, `max_memory`, `n_devices`.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from tl_devicefix.balance import balanced, sequential
from tl_devicefix.components import (
    FIXED_AT_HOME,
    ComponentSize,
    component_of,
    component_sizes,
    shared_once,
)
from tl_devicefix.devices import (
    DeviceLike,
    all_from,
    consecutive,
    default_device,
    resolve,
    with_index,
)
from tl_devicefix.fitting import MaxMemory, capacity, check_fit, check_max_memory, gib
from tl_devicefix.model_config import model_config, torch_dtype

DeviceMap = str | int | torch.device | Mapping[str, DeviceLike]
"""A strategy ("auto", "balanced", "sequential"), one device, or components -> devices."""

STRATEGIES = ("auto", "balanced", "sequential")


@dataclass(frozen=True)
class PlacedComponent:
    """One component, where it lives, and what it weighs there (bytes)."""

    name: str
    device: torch.device
    weights: int
    buffers: int = 0
    shared: str | None = None
    """Blocks on one device that name the same here hold their buffers together, in one copy."""


@dataclass(frozen=True, repr=False)
class Placement:
    """Where each component of a HookedTransformer lives. Immutable; printing it shows a table."""

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

    def device_of(self, name: str) -> torch.device:
        """The device of a component, parameter or buffer, by name.

        Raises:
            KeyError: if the name belongs to no component of this model.
        """
        return self._device_by_name[component_of(name)]

    def device_for(self, name: str) -> torch.device:
        """The device of anything in the model, by name: what is in no component is at home."""
        return self._device_by_name.get(component_of(name), self.home)

    def bytes_on(self, device: DeviceLike) -> int:
        """Bytes of weights and buffers planned for a device: 1, "cuda:1" or a torch.device."""
        if isinstance(device, int):
            device = torch.device(self.home.type, device)
        device = with_index(torch.device(device))
        here = [c for c in self.components if c.device == device]
        return sum(c.weights for c in here) + shared_once(here)

    def gathered_on(self, device: torch.device) -> Placement:
        """The same components, all on one device."""
        return Placement(tuple(replace(c, device=device) for c in self.components))

    def reweighed(self, cfg: Any) -> Placement:
        """The same devices, with the sizes that the components have by this config."""
        return Placement(
            tuple(_placed(size, self._device_by_name[size.name]) for size in component_sizes(cfg))
        )

    def __repr__(self) -> str:
        rows = [("device", "components", "weights", "total")]
        for device in self.devices:
            here = [c for c in self.components if c.device == device]
            weights = sum(c.weights for c in here)
            label = f"{device} (home)" if device == self.home else str(device)
            names = in_short([c.name for c in here])
            rows.append((label, names, gib(weights), gib(self.bytes_on(device))))
        everything = sum(self.bytes_on(device) for device in self.devices)
        rows.append(("total", "", gib(sum(c.weights for c in self.components)), gib(everything)))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        return "\n".join(
            f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:>{widths[2]}}  "
            f"{row[3]:>{widths[3]}}".rstrip()
            for row in rows
        )


def _placed(size: ComponentSize, device: torch.device) -> PlacedComponent:
    return PlacedComponent(size.name, device, size.weights, size.buffers, size.shared)


def in_short(names: Sequence[str]) -> str:
    """["embed", "blocks.0", "blocks.1", "blocks.2"] -> "embed, blocks.0-2"."""
    runs: list[list[str]] = []
    for name in names:
        previous = runs[-1][-1] if runs else ""
        follows = name.startswith("blocks.") and previous.startswith("blocks.")
        if follows and int(name[7:]) == int(previous[7:]) + 1:
            runs[-1].append(name)
        else:
            runs.append([name])
    return ", ".join(r[0] if len(r) == 1 else f"{r[0]}-{r[-1][7:]}" for r in runs)


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
    with more free memory gets more.

    Args:
        config_or_model_name: a HookedTransformerConfig, or whatever `from_pretrained` takes as a
            model name (a name TransformerLens knows, or a local checkpoint directory). The sizes
            of common models are known, so that the hub is not asked for their configs.
        n_devices: over how many devices to spread the blocks; 1 if nothing else is said.
        device: the home device; the others are those that follow it. "cuda:2" with `n_devices=2`
            means cuda:2 and cuda:3.
        device_map: instead of `n_devices`: "balanced" or "auto" (every device there is, evenly),
            "sequential" (fill each before the next), one device, or a dict from components
            ("embed", "blocks.3", "unembed") or prefixes ("blocks", "") to devices.
        max_memory: the most to use of each device, e.g. `{0: "20GiB", 1: "40GiB"}`. A strategy
            uses the named devices only.
        dtype: the dtype to weigh the parameters in; by default the config's. Norms are weighed too,
            which a model that is loaded with `fold_ln=True` no longer has.

    Raises:
        ValueError: one sentence saying what does not fit together and what to do.
    """
    cfg = _config(config_or_model_name, dtype)
    placement = decide(cfg, n_devices, device, device_map, max_memory)
    check_fit(placement, max_memory, cfg.dtype)
    return placement


def decide(
    cfg: Any,
    n_devices: int | None = None,
    device: DeviceLike | None = None,
    device_map: DeviceMap | None = None,
    max_memory: MaxMemory | None = None,
) -> Placement:
    """As `plan`, for a config, whether or not it fits.

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
    sizes = component_sizes(cfg)
    if device_map is not None and device_map not in STRATEGIES:
        named = device_map if isinstance(device_map, Mapping) else _whole_on(device_map)
        placement = _from_dict(sizes, named, device)
        _warn_of_unused(max_memory, placement.devices)
        return placement
    home = default_device() if device is None else resolve(device)
    devices = _devices_to_use(home, n_devices, device_map, max_memory)
    _warn_of_unused(max_memory, devices)
    # A device that may hold nothing is left out; home is not, so that what it lacks is reported.
    devices = [d for d in devices if d == home or capacity(d, max_memory) != 0]
    capacities = [capacity(d, max_memory) for d in devices]
    if device_map == "sequential":
        counts = sequential(sizes, capacities)
    else:
        counts = balanced(sizes, capacities)
    return _contiguous(sizes, devices, counts)


def _config(config_or_model_name: Any, dtype: torch.dtype | str | None) -> Any:
    if isinstance(config_or_model_name, str | os.PathLike):
        wanted = torch.float32 if dtype is None else torch_dtype(dtype)
        name = os.fspath(config_or_model_name)
        return model_config(name, prefer_known=True, dtype=wanted)
    if dtype is None:
        return config_or_model_name
    cfg = copy.copy(config_or_model_name)
    cfg.dtype = torch_dtype(dtype)
    return cfg


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
            "max_memory names %s, where nothing is placed: only %s may be used.",
            ", ".join(sorted(unused)),
            ", ".join(map(str, devices)),
        )


def _contiguous(
    sizes: Sequence[ComponentSize], devices: Sequence[torch.device], counts: Sequence[int]
) -> Placement:
    of_block = [device for device, count in zip(devices, counts) for _ in range(count)]
    placed = []
    for size in sizes:
        device = devices[0] if size.name in FIXED_AT_HOME else of_block.pop(0)
        placed.append(_placed(size, device))
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
    placement = Placement(tuple(placed))
    if home is not None and resolve(home) != placement.home:
        raise ValueError(
            f"device={str(home)!r} is not where device_map puts embed ({placement.home}): embed "
            "decides the home device, so leave device out"
        )
    return placement


def _whole_on(device: DeviceLike) -> dict[str, DeviceLike]:
    try:
        return {"": resolve(device)}
    except ValueError as error:
        raise ValueError(
            f"device_map={device!r} is neither a device ({error}) nor one of "
            f"{', '.join(map(repr, STRATEGIES))}"
        ) from error


def _is_prefix(key: str, name: str) -> bool:
    return key == "" or name == key or name.startswith(f"{key}.")

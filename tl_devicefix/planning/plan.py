"""`plan(...)`: where each component of a model would live, on devices that need not exist."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from tl_devicefix.placement.deciding import DeviceMap, decide_fitting, tell_of_unused
from tl_devicefix.placement.devices import (
    DEVICE_TYPE,
    DeviceLike,
    Hosts,
    Site,
    check_number,
    names_host,
    site_named,
)
from tl_devicefix.placement.memory import MaxMemory
from tl_devicefix.placement.placement import Placement
from tl_devicefix.planning.blueprints import adapter_to_load, blueprint
from tl_devicefix.simulation import simulate_apart, simulated_sites

UNLIMITED = 2**60
"""Bytes of a device of which nothing is known, or asked."""


def plan(
    config_or_model_name: Any,
    n_devices: int | None = None,
    device: DeviceLike | None = None,
    device_map: DeviceMap | None = None,
    max_memory: MaxMemory | None = None,
    dtype: torch.dtype | str | None = None,
    hosts: Hosts | None = None,
) -> Placement:
    """Return where each component of a model would live, without loading or allocating it.

    Blocks lie in contiguous ranges over the home device and those after it. Home also has the
    embeddings, the final norm and the unembedding, so it gets fewer blocks. A device with more free
    memory gets more. Weights of offloaded blocks live in CPU memory, and are copied to a device
    while the block runs.

    Args:
        config_or_model_name: a HookedTransformerConfig, or whatever `from_pretrained` takes as a
            model name (a name TransformerLens knows, or a local checkpoint directory). The sizes
            of common models are known, so that the hub is not asked for their configs. With
            TransformerLens 4: a transformers config, or what `boot_transformers` takes.
        n_devices: over how many devices to spread the blocks; by default those that `max_memory`
            names, and 1 if nothing else is said.
        device: the home device; the others are those that follow it. "cuda:2" with `n_devices=2`
            means cuda:2 and cuda:3. By default the current device, or the lowest that `max_memory`
            names.
        device_map: instead of `n_devices`: "balanced" or "auto" (every device there is, evenly),
            "sequential" (fill each before the next), one device, or a dict from components
            ("embed", "blocks.3", "unembed") or prefixes ("blocks", "") to devices. Blocks on
            "cpu" are offloaded if embed is elsewhere: they run where the block before them does.
        max_memory: the most that weights may take of each device: `{0: "20GiB", 1: "40GiB"}`.
            The devices that it names are used, and no others, unless `n_devices` says how many.
            With "cpu" in it, blocks that do not fit are offloaded.
        dtype: the dtype of the parameters; by default the config's. Sizes include norms, although
            loading with `fold_ln=True` removes them.
        hosts: how many hosts to plan for; they need not exist. `n_devices` of all of them together
            are divided evenly over them in order, and called "host0/0", "host0/1", ... Or how many
            devices each host has, `[8, 4]`, without `n_devices`. Their free memory is not known, so
            give `max_memory`; you may give a `device_map` beside `n_devices`. The plan equals that
            of a load after `tl_devicefix.init_hosts`, and lists the bytes that a forward sends from
            host to host.

    Returns:
        The placement; printing it shows a table of devices, components and their bytes.

    Raises:
        ValueError: if the arguments do not fit together, or the weights do not fit.
    """
    sites = simulated_sites(n_devices, hosts)
    # Norms are weighed too; of a Bridge, nothing is folded as it is booted.
    is_of_bridge = adapter_to_load(config_or_model_name).NAME == "TransformerBridge"
    options = {} if is_of_bridge else {"fold_ln": False}
    model = blueprint(config_or_model_name, dtype, options)
    sizes = model.sizes()
    if not sites:
        return decide_fitting(sizes, n_devices, device, device_map, max_memory)
    device, device_map, max_memory = (by_index(e, sites) for e in (device, device_map, max_memory))
    spread = None if device_map is not None else len(sites)
    with simulate_apart(len(sites), UNLIMITED, hosts):
        return decide_fitting(sizes, spread, device, device_map, max_memory)


def by_index(named: Any, sites: Sequence[Site] = ()) -> Any:
    """A `device_map` or `max_memory` with "cuda:1" called 1, as the machine may have none."""

    def index(device: Any) -> Any:
        if names_host(device):
            return site_named(device, sites).torch_device.index
        kind, _, number = str(device).partition(":")
        return int(number) if kind != "cpu" and number.isdecimal() else device

    if not isinstance(named, Mapping):
        return named if isinstance(named, int) else index(named) if named is not None else None
    return {index(key): index(value) for key, value in named.items()}


class Described(NamedTuple):
    """A user's arguments about devices, by their indices."""

    n_devices: int
    """How many there must be."""
    device_map: Any
    max_memory: Any
    memory: Any
    names_used: bool
    """Whether `max_memory` alone says which of them are used."""

    @property
    def spread(self) -> int | None:
        """Over how many the blocks are spread; None if the other arguments say which are used."""
        return None if self.names_used or self.device_map is not None else self.n_devices


def described(
    n_devices: int | None, hosts: Hosts | None, device_map: Any, max_memory: Any, memory: Any
) -> Described:
    """Read a user's arguments about devices; log a warning of any that do not exist."""
    sites = simulated_sites(n_devices, hosts)
    device_map, max_memory, memory = (by_index(e, sites) for e in (device_map, max_memory, memory))
    named = [*(device_map.values() if isinstance(device_map, Mapping) else [device_map])]
    named += [key for sizes in (max_memory, memory) if isinstance(sizes, Mapping) for key in sizes]
    least = 1 + max((index for index in named if type(index) is int), default=0)
    count: Any = len(sites) or (least if n_devices is None else n_devices)
    check_number(count)
    names_used = False
    if isinstance(max_memory, Mapping):
        numbers = [key for key in max_memory if type(key) is int]
        names_used = bool(numbers) and n_devices is None and not sites
        used = [*map(_called, range(count)), *(["cpu"] if "cpu" in max_memory else [])]
        beyond = {index for index in numbers if index >= count}
        tell_of_unused([*map(_called, beyond)], used)
        max_memory = {key: size for key, size in max_memory.items() if key not in beyond}
    return Described(count, device_map, max_memory, memory, names_used)


def _called(index: int) -> str:
    return f"{DEVICE_TYPE}:{index}"

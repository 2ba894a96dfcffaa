"""Decide where each component of a model lives, from its size and the user's arguments.

`decide` reads sizes, the arguments, and devices with their free memory. It returns a `Placement`,
which loading, routing and reporting read, and changes nothing. `device_map` and `max_memory` are
accelerate's words, `n_devices` is TransformerLens's.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from tl_devicefix.errors import did_you_mean, shown
from tl_devicefix.placement.balance import Share, balanced, filled_in_order, fits, shares
from tl_devicefix.placement.devices import (
    CPU,
    DeviceLike,
    consecutive,
    default_device,
    device_count,
    is_device,
    others,
    resolve,
)
from tl_devicefix.placement.elsewhere import is_elsewhere
from tl_devicefix.placement.fitting import check_fit
from tl_devicefix.placement.memory import Limits, MaxMemory, by_device, capacity
from tl_devicefix.placement.placement import (
    REST,
    ComponentSize,
    PlacedComponent,
    Placement,
    in_short,
    names_block,
)

_log = logging.getLogger(__name__)

DeviceMap = str | int | torch.device | Mapping[str, DeviceLike]
"""A strategy ("auto", "balanced", "sequential"), one device, or component or prefix -> device."""

STRATEGIES = ("auto", "balanced", "sequential")

_FILLED = 0.9
"""Share of the free memory to fill if blocks are offloaded and the user sets no lower limit.

The rest is for activations.
"""

_NAMED_IN_MAPS = ("embed", "pos_embed", "ln_final", "unembed")
"""Components that a dict must cover, besides all blocks; others may be left out."""


def names_places(device_map: DeviceMap | None) -> bool:
    """Return True if a map says where components are: it is neither None nor a strategy."""
    return device_map is not None and device_map not in STRATEGIES


def decide_fitting(
    sizes: Sequence[ComponentSize],
    n_devices: int | None = None,
    device: DeviceLike | None = None,
    device_map: DeviceMap | None = None,
    max_memory: MaxMemory | None = None,
) -> Placement:
    """Decide where components of these sizes live; raise an error if they do not fit."""
    placement = decide(sizes, n_devices, device, device_map, max_memory)
    check_fit(placement, max_memory)
    in_map = device_map.values() if isinstance(device_map, Mapping) else [device_map]
    limited = max_memory if isinstance(max_memory, Mapping) else ()
    indices = [named for named in (device, *in_map, *limited) if type(named) is int]
    if indices and default_device() == CPU and not others().devices:
        _log.warning(
            "device %d is asked for, but there is no GPU here, so the model is placed on the CPU",
            indices[0],
        )
    return placement


def decide(
    sizes: Sequence[ComponentSize],
    n_devices: int | None = None,
    device: DeviceLike | None = None,
    device_map: DeviceMap | None = None,
    max_memory: MaxMemory | None = None,
) -> Placement:
    """Decide where components of these sizes live, even if they do not fit."""
    if device_map is not None and n_devices not in (None, 1):
        raise ValueError(
            f"both device_map={shown(device_map)} and n_devices={n_devices} are given: device_map "
            "already says which devices to use, so leave n_devices out"
        )
    if n_devices is not None and (type(n_devices) is not int or n_devices < 1):
        raise ValueError(f"n_devices must be an int of 1 or more, but is {shown(n_devices)}")
    if device_map is not None and names_places(device_map):
        if not isinstance(device_map, Mapping):
            if not is_device(device_map):
                raise ValueError(
                    f"device_map={shown(device_map)} is neither a device nor one of "
                    f"{', '.join(map(repr, STRATEGIES))}, nor a dict from components to devices"
                    f"{did_you_mean(device_map, STRATEGIES)}"
                )
            device_map = {"": device_map}
        return _from_dict(sizes, device_map, device)
    home = default_device() if device is None else resolve(device)
    limits = by_device(max_memory, home)  # none yet, if one size is for all devices
    devices = _devices_to_use(home, device, n_devices, device_map, limits)
    limits = by_device(max_memory, home, devices)
    home = devices[0]  # without `device`, the lowest that `max_memory` names
    may_offload = home != CPU and CPU in limits
    rooms = [capacity(d, limits) for d in devices]
    spread = filled_in_order if device_map == "sequential" else balanced
    counts = spread(sizes, rooms)
    on_each = [Share(count) for count in counts]
    if may_offload and not fits(sizes, counts, rooms):
        # Fill a limit that is below the free memory, and otherwise only a share of the latter.
        to_fill = [
            room if room is None or room == limits.get(device) else int(_FILLED * room)
            for device, room in zip(devices, rooms)
        ]
        on_each = shares(sizes, to_fill, [not is_elsewhere(device) for device in devices])
    return _placed_in_order(sizes, devices, on_each)


def _devices_to_use(
    home: torch.device,
    device: DeviceLike | None,
    n_devices: int | None,
    strategy: DeviceMap | None,
    limits: Limits,
) -> list[torch.device]:
    """Return the devices to use, home first. The first of these rules that applies decides:

    1. `n_devices` without a strategy: that many, from home on;
    2. the devices that `max_memory` names;
    3. a strategy: home and all devices after it, also those of other hosts;
    4. home alone.
    """
    if is_elsewhere(home):
        raise ValueError(
            f"device={str(device)!r} is on another host, where only blocks can be: leave device "
            "out, or name a device of this host"
        )
    if n_devices is not None and strategy is None:
        return consecutive(home, n_devices)
    # Take devices of home's type or other hosts': "cpu" in `max_memory` only allows offloading.
    usable = (other for other in limits if other.type == home.type or is_elsewhere(other))
    named = sorted(usable, key=lambda other: (is_elsewhere(other), other.index or 0))
    if named and device is not None:  # devices after home first, then those before it
        after = [d for d in named if is_elsewhere(d) or (d.index or 0) > (home.index or 0)]
        named = [home, *after, *(other for other in named if other not in (home, *after))]
    if named:
        return named
    if strategy is None:
        return [home]
    of_hosts = others().devices
    count = len(of_hosts) if home in of_hosts else device_count(home.type)
    return consecutive(home, max(count - (home.index or 0), 1))


def _placed_in_order(
    sizes: Sequence[ComponentSize], devices: Sequence[torch.device], on_each: Sequence[Share]
) -> Placement:
    block_places = [
        (device, position in share.offloaded)
        for device, share in zip(devices, on_each)
        for position in range(share.blocks)
    ]
    placed = []
    for size in sizes:
        device, offloaded = block_places.pop(0) if names_block(size.name) else (devices[0], False)
        placed.append(PlacedComponent(**vars(size), device=device, offloaded=offloaded))
    return Placement(tuple(placed))


def _from_dict(
    sizes: Sequence[ComponentSize], device_map: Mapping[str, DeviceLike], home: DeviceLike | None
) -> Placement:
    """Place components by a user's dict, in which the longest matching prefix decides."""
    names = [size.name for size in sizes if size.name != REST]
    for key in device_map:
        if not any(_is_prefix(key, name) for name in names):
            raise ValueError(
                f"device_map names {key!r}, but this model has no such component: name one of "
                f"{in_short(names)} (each placed as a whole), a prefix such as 'blocks', or '' for "
                "all"
            )
    placed, missing = [], []
    like = None if home is None else resolve(home)
    for size in sizes:
        name = "embed" if size.name == REST else size.name
        keys = [key for key in device_map if _is_prefix(key, name)]
        # Other components, such as a Bridge's rotary embedding, go with `embed`: they are small.
        if not keys and not (names_block(size.name) or size.name in _NAMED_IN_MAPS):
            keys = [key for key in device_map if _is_prefix(key, "embed")]
        if not keys:
            missing.append(size.name)
            continue
        device = _device_for(size.name, device_map[max(keys, key=len)], like)
        placed.append(PlacedComponent(**vars(size), device=device))
        like = like or device  # the first component decides the home device
    if missing:
        raise ValueError(
            f"device_map leaves out {in_short(missing)}: give each component a device, or "
            "use device_map='balanced'"
        )
    placement = Placement(_offload_cpu_blocks(placed))
    if home is not None and resolve(home) != placement.home:
        raise ValueError(
            f"device={str(home)!r} is not where device_map puts embed ({placement.home}): embed "
            "decides the home device, so leave device out"
        )
    return placement


def _offload_cpu_blocks(placed: Sequence[PlacedComponent]) -> tuple[PlacedComponent, ...]:
    """Mark blocks that a map puts on the CPU as offloaded, unless home is the CPU."""
    home = placed[0].device
    # An offloaded block runs on the device of the last block before it that is on a device of this
    # host (not the CPU), else of the first such block after it, else at home.
    devices = (c.device for c in placed if names_block(c.name) and not is_elsewhere(c.device))
    device = next((device for device in devices if device != CPU), home)
    running = list(placed)
    for position, component in enumerate(placed):
        if not names_block(component.name) or is_elsewhere(component.device):
            continue
        if component.device != CPU:
            device = component.device
        elif home != CPU and not is_elsewhere(home):
            running[position] = replace(component, device=device, offloaded=True)
    return tuple(running)


def _device_for(component: str, named: DeviceLike, home: torch.device | None) -> torch.device:
    """Return the device that a map gives for a component; an index is of home's type."""
    try:
        device = resolve(named, home)
    except ValueError as error:
        raise ValueError(f"device_map puts {component} on {shown(named)}, but {error}") from error
    if str(device) == "meta":
        raise ValueError(f"device_map puts {component} on 'meta', where it would have no values")
    # Allow a `torch.device`: a worker's map puts embeddings on the driver's device.
    if not names_block(component) and is_elsewhere(device) and not isinstance(named, torch.device):
        raise ValueError(
            f"device_map puts {component} on another host, where only blocks can be: put it on a "
            "device of this host"
        )
    return device


def _is_prefix(key: str, name: str) -> bool:
    return key == "" or name == key or name.startswith(f"{key}.")

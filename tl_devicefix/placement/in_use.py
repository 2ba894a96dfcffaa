"""The devices in use: those of the models that are placed, for as long as these live."""

from __future__ import annotations

import weakref

import torch

from tl_devicefix.placement.gathering_device import chosen_device, tell_listeners
from tl_devicefix.placement.placement import Placement

# By identity, as equal placements of two models are two; in the order they were placed.
_placements: dict[int, weakref.ref[Placement]] = {}
_devices: frozenset[torch.device] | None = frozenset()
_latest_home: torch.device | None = None  # whose type an index has that `gather_on` is given


def use(placement: Placement) -> None:
    """Count a placement's devices as in use, as long as a model (or anyone) holds it."""
    key = id(placement)
    _forget(key)
    _placements[key] = weakref.ref(placement, lambda _: _forget(key))
    tell_listeners()


def _forget(key: int) -> None:
    global _devices
    _placements.pop(key, None)
    _devices = None


def devices_in_use() -> frozenset[torch.device]:
    """Those of every placed model, the host if blocks are offloaded, and that of `gather_on`."""
    global _devices, _latest_home
    devices = _devices  # which is forgotten at any time, as a model may go in any thread
    if devices is None:
        placements = _in_use()
        _devices = devices = frozenset(device for each in placements for device in each.memories)
        _latest_home = placements[-1].home if placements else None
    chosen = chosen_device(_latest_home)
    return devices if chosen is None else devices | {chosen}


def home_of(devices: frozenset[torch.device]) -> torch.device:
    """Where the results of mixing some devices in use belong.

    That of `gather_on`; else the home of the model that was placed last, of those that are on all
    of the devices, or, where none is, on one of them.
    """
    chosen = chosen_device(_latest_home)
    if chosen is not None:
        return chosen
    latest = [each for each in reversed(_in_use()) if devices & set(each.memories)]
    return next((each for each in latest if devices <= set(each.memories)), latest[0]).home


def _in_use() -> list[Placement]:
    there = (reference() for reference in list(_placements.values()))
    return [placement for placement in there if placement is not None]

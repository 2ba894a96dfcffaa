"""The devices in use: those of the models that are placed, for as long as these live."""

from __future__ import annotations

import weakref

import torch

from tl_devicefix.placement.gathering_device import chosen_device
from tl_devicefix.placement.of_ranks import note_parts
from tl_devicefix.placement.placement import Placement

# By identity, as equal placements of two models are two; in the order they were placed.
_placements: dict[int, weakref.ref[Placement]] = {}
# Their devices, and the home of the latest, once asked for. At each change it is a fresh list, as
# models come and go in any thread: what was found out meanwhile stays in the old one.
_found: list[tuple[frozenset[torch.device], torch.device | None]] = []


def use(placement: Placement) -> None:
    """Count a placement's devices as in use, as long as a model (or anyone) holds it."""
    global _found
    key = id(placement)
    _placements.pop(key, None)
    _placements[key] = weakref.ref(placement, lambda _: _forget(key))
    _found = []
    note_parts(placement)


def _forget(key: int) -> None:
    global _found
    _placements.pop(key, None)
    _found = []


def devices_in_use() -> frozenset[torch.device]:
    """Those of every placed model, the host if blocks are offloaded, and that of `gather_on`."""
    devices, latest_home = _find()
    chosen = chosen_device(latest_home)
    return devices if chosen is None else devices | {chosen}


def _find() -> tuple[frozenset[torch.device], torch.device | None]:
    found = _found
    if not found:
        placements = _in_use()
        devices = frozenset(device for each in placements for device in each.memories)
        found.append((devices, placements[-1].home if placements else None))
    return found[0]


def home_of(devices: frozenset[torch.device]) -> torch.device:
    """Where the results of mixing some devices in use belong.

    That of `gather_on`; else the home of the model that was placed last, of those that are on all
    of the devices, or, where none is, on one of them; else, where all have just gone, one of them.
    """
    chosen = chosen_device(_find()[1])
    if chosen is not None:
        return chosen
    latest = [each for each in reversed(_in_use()) if devices & set(each.memories)]
    if not latest:
        return min(devices, key=str)
    return next((each for each in latest if devices <= set(each.memories)), latest[0]).home


def _in_use() -> list[Placement]:
    there = (reference() for reference in list(_placements.values()))
    return [placement for placement in there if placement is not None]

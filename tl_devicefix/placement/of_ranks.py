"""Which part of a model each rank has, for errors to say."""

from __future__ import annotations

from tl_devicefix.multihost.far_devices import far_devices
from tl_devicefix.multihost.peers import note_held
from tl_devicefix.placement.devices import site_of
from tl_devicefix.placement.placement import Placement, in_short


def note_parts(placement: Placement) -> list[int]:
    """Note what each rank holds, or will, for as long as a placement lives.

    Returns:
        The ranks, if devices are of several, but not rank 0.
    """
    names: dict[int, list[str]] = {}
    for component in placement.components if far_devices() else ():
        site = site_of(component.device, placement.sites)
        if site is not None:
            names.setdefault(site.host, []).append(component.name)
    if names:
        note_held(placement, {rank: in_short(held) for rank, held in names.items()})
    return sorted(names.keys() - {0})

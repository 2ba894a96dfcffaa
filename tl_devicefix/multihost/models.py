"""What ranks hold of models: noted for errors to say, and the same checkpoint on each of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import ref

from tl_devicefix.checkpoints.hub import is_checkpoint_directory, snapshot
from tl_devicefix.placement.devices import site_of
from tl_devicefix.placement.placement import Placement, in_short

_KINDS = ("config.json", "*.index.json", "*.safetensors", "*.bin")
_noted: dict[int, tuple[ref[Any], Mapping[int, str]]] = {}


def note_held(placement: Placement) -> list[int]:
    """Note what each rank holds while a placement lives; returns the ranks, but for rank 0."""
    names: dict[int, list[str]] = {}
    for component in placement.components:
        site = site_of(component.device, placement.sites)
        if site is not None:
            names.setdefault(site.host, []).append(component.name)
    if names:
        parts = {rank: in_short(components) for rank, components in names.items()}
        key = id(placement)
        _noted[key] = ref(placement, lambda _: _noted.pop(key, None)), parts
    return sorted(names.keys() - {0})


def parts_of(rank: int) -> str:
    """What a rank holds of models, in short; "" if that is nothing."""
    parts = [parts[rank] for _, parts in list(_noted.values()) if parts.get(rank)]
    return " and ".join(dict.fromkeys(parts))  # in a load, the plan is noted beside the model


def held_by(rank: int) -> str:
    """What a rank holds, as a clause behind its name; "" if that is nothing."""
    parts = parts_of(rank)
    return f", which holds {parts}," if parts else ""


def ranks_of(placement: Placement) -> dict[int, int]:
    """Ranks that a placement uses, but for rank 0, and a device of each."""
    sites = [site_of(device) for device in placement.devices]
    return {site.host: site.index for site in sites if site is not None and site.host}


def files_of(model_name: str, kwargs: dict[str, Any]) -> dict[str, Path]:
    """The files of a checkpoint that are here: their real paths, and what they are called."""
    try:
        is_directory = is_checkpoint_directory(model_name)
        folder = Path(model_name) if is_directory else snapshot(model_name, **kwargs)
    except ValueError:  # of a hub that cannot be reached, of which transformers tells
        return {}
    return {os.path.realpath(path): path for kind in _KINDS for path in sorted(folder.glob(kind))}

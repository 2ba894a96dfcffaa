"""A checkpoint on several ranks: before anything is loaded, each has the same files as rank 0."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tl_devicefix.checkpoints.directories import is_checkpoint_directory
from tl_devicefix.checkpoints.hub import snapshot
from tl_devicefix.multihost.far_devices import far_devices
from tl_devicefix.multihost.mapped import known
from tl_devicefix.placement.devices import site_of
from tl_devicefix.placement.of_ranks import note_parts
from tl_devicefix.placement.placement import Placement

_KINDS = ("config.json", "*.index.json", "*.safetensors", "*.bin")


def check_on_ranks(model_name: str, placement: Placement, **kwargs: Any) -> None:
    """Have each rank that a placement uses compare its files of a checkpoint with rank 0's.

    Args:
        model_name: a local checkpoint directory or a name on the hub.
        placement: where the model goes.
        kwargs: `from_pretrained`'s arguments.

    Raises:
        ValueError: if one has not the same, naming the rank, what it is to hold, and the file.
    """
    far, ranks = far_devices(), note_parts(placement)
    if far is None or not ranks:
        return
    paths = _paths(model_name, kwargs)
    for rank, wrong in far.differences([known(path) for path in paths], ranks).items():
        if wrong:
            path, why = next(iter(wrong.items()))
            more = f" (and of {len(wrong) - 1} more files)" if wrong.keys() - {path} else ""
            raise ValueError(
                f"rank 0 loads {paths[path]}, but {far.name_of(rank)} {why}{more}: put the same "
                "checkpoint at the same path on each host, or load it on rank 0 into memory and "
                "give it as hf_model, whose weights are sent"
            )


def wait_for_ranks(placement: Placement) -> None:
    """At the end of a load, wait until each rank has done its part.

    Raises:
        RuntimeError: what failed there, as where there was no memory; or a rank is lost.
    """
    far = far_devices()
    if far is None:
        return
    sites = {site.host: site for each in placement.devices if (site := site_of(each)) is not None}
    for rank, site in sites.items():
        if rank:
            far.synchronize(site.index)


def _paths(model_name: str, kwargs: dict[str, Any]) -> dict[str, Path]:
    """The files of a checkpoint that are here: their real paths, and what they are called."""
    try:
        is_directory = is_checkpoint_directory(model_name)
        folder = Path(model_name) if is_directory else snapshot(model_name, **kwargs)
    except ValueError:  # of a hub that cannot be reached, of which transformers tells
        return {}
    return {os.path.realpath(path): path for kind in _KINDS for path in sorted(folder.glob(kind))}

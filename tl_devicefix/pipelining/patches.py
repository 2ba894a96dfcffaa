"""What is replaced of `transformer_lens.patching`, for either class."""

from __future__ import annotations

from tl_devicefix.monkeypatch.patch import Patch
from tl_devicefix.pipelining import patching_loops

takes = ("model", "corrupted_tokens", "clean_cache", "patching_metric")
why = "each run starts at the block that it patches; several are in flight on several devices"

PATCHES = (
    Patch(
        "generic_activation_patch",
        patching_loops.generic_activation_patch,
        (*takes, "patch_setter", "activation_name", "index_axis_names", "index_df"),
        why,
        owner=None,
        until="4",
    ),
    *(
        Patch(name, partial, takes, why, owner=None, until="4")
        for name, partial in patching_loops.PARTIALS.items()
    ),
)

"""HookedTransformer across several devices: loading, processing, moving, and running it.

This module is its `tl_devicefix.adapters.Adapter`; importing it registers the patches.
"""

from __future__ import annotations

from transformer_lens import HookedTransformer

from tl_devicefix.dispatch.views import View
from tl_devicefix.hooked_transformer import (  # noqa: F401  # these register patches
    config,
    forward,
    fused,
    loading,
    moving,
    processing,
)
from tl_devicefix.hooked_transformer.blueprint import HookedBlueprint, option_names
from tl_devicefix.placement.placement import Placement

__all__ = ["model_class", "option_names"]

name = "HookedTransformer"
view_of = View
model_class = HookedTransformer
run_methods = (
    *("forward", "run_with_hooks", "input_to_embed"),
    *("hooks", "hook_points", "reset_hooks", "remove_all_hook_fns"),
)
read_blueprint = HookedBlueprint
has_dropout = False


def passes_stream_alone(model: HookedTransformer) -> bool:
    """Return True: a HookedTransformer's blocks pass on only the residual stream."""
    return True


def realign(model: HookedTransformer, placement: Placement | None) -> None:
    """Update the config and the hooks after parts were moved or assigned."""
    moving.share_buffers(model)
    if placement is not None:
        moving.settle(model, placement)
    model.setup()

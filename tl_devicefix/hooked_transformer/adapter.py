"""The adapter of HookedTransformer: see `tl_devicefix.adapters`.

Importing it registers the patches of its package.
"""

from __future__ import annotations

from typing import Any

from transformer_lens import HookedTransformer as model_class

from tl_devicefix.dispatch.views import view_of
from tl_devicefix.hooked_transformer import (  # noqa: F401  # which have patches
    config,
    forward,
    fused,
    loading,
    mended,
    moving,
    processing,
)
from tl_devicefix.hooked_transformer.blueprint import HookedBlueprint, option_names
from tl_devicefix.placement.placement import Placement

__all__ = ["model_class", "option_names", "view_of"]

NAME = "HookedTransformer"
RUN_METHODS = ("forward", "run_with_hooks", "input_to_embed")
SETUP_HINT = "the model was set up", "model.setup()"
read_blueprint = HookedBlueprint.read
HAS_DROPOUT = False  # always in training mode, and without dropout


def passes_stream_alone(model: Any) -> bool:
    """Return True, because a HookedTransformer's blocks pass on nothing else."""
    return True


def realign(model: Any, placement: Placement | None) -> None:
    """See `Adapter.realign`."""
    moving.share_buffers(model)
    if placement is not None:
        moving.settle(model, placement)
    model.setup()

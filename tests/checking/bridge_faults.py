"""How Bridges are broken, and what a check finds."""

from __future__ import annotations

from typing import Any

from faults import OF_EITHER, Fault, block_moved, home_renamed, identity
from hf_models import D_MODEL
from torch import nn


def mlp_replaced_in_the_wrapped_model(model: Any) -> None:
    model.original_model.model.layers[2].mlp = nn.Linear(D_MODEL, D_MODEL).to("sim:0")


def weight_moved(model: Any) -> None:
    weight = model.blocks[4].attn.q._original_component.weight
    weight.data = weight.data.to("cpu")


def hook_left(model: Any) -> None:
    model.add_hook("blocks.2.hook_resid_post", identity)


FAULTS = {
    **OF_EITHER,
    "a module of the wrapped model replaced": Fault(
        mlp_replaced_in_the_wrapped_model, "device", "blocks.2._original_component.mlp",
        ("is on sim:0", "puts it on sim:2"), 'model.blocks[2]._original_component.mlp.to("sim:2")',
        mends=False,
    ),
    "a weight moved": Fault(
        weight_moved, "device", "blocks.4.attn.q",
        ("is on cpu", "puts it on sim:3"), 'model.blocks[4].attn.q.to("sim:3")',
    ),
    "a hook": Fault(
        hook_left, "hooks", "blocks.2.hook_out", ("identity",), "model.reset_hooks()"
    ),
}  # fmt: skip

MISPLACED = (block_moved, weight_moved, home_renamed)
"""What a repair brings back."""

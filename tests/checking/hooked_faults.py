"""How HookedTransformers are broken, and what a check finds."""

from __future__ import annotations

from typing import Any

from faults import OF_EITHER, Fault, block_moved, home_renamed, identity
from torch import nn
from transformer_lens.components import LayerNormPre, TransformerBlock


def parameter_replaced(model: Any) -> None:
    model.unembed.W_U = nn.Parameter(model.unembed.W_U.detach().to("sim:2"))


def some_parameters_moved(model: Any) -> None:
    for name in ("_W_K", "W_Q"):
        parameter = getattr(model.blocks[4].attn, name)
        parameter.data = parameter.data.to("cpu")


def block_replaced(model: Any) -> None:
    weights = model.blocks[2].state_dict()
    model.blocks[2] = TransformerBlock(model.cfg, 2).to("sim:2")
    model.blocks[2].load_state_dict(weights, strict=False)


def hook_left(model: Any) -> None:
    model.blocks[2].hook_resid_post.add_hook(identity, dir="bwd")


def config_says_otherwise(model: Any) -> None:
    model.cfg.normalization_type = "RMS"


def a_norm_is_another(model: Any) -> None:
    model.blocks[2].ln2 = LayerNormPre(model.cfg)
    model.setup()


FAULTS = {
    **OF_EITHER,
    "a parameter replaced": Fault(
        parameter_replaced, "device", "unembed.W_U",
        ("is on sim:2", "puts it on sim:0", "2.5 KiB"), 'model.unembed.to("sim:0")',
    ),
    "some parameters moved": Fault(
        some_parameters_moved, "device", "W_Q, _W_K of blocks.4.attn",
        ("is on cpu", "puts it on sim:3"), 'model.blocks[4].attn.to("sim:3")',
    ),
    "a block replaced": Fault(
        block_replaced, "setup", "blocks.2", ("has changed since",), "model.setup()"
    ),
    "a hook": Fault(
        hook_left, "hooks", "blocks.2.hook_resid_post", ("identity",), "model.reset_hooks()"
    ),
    "a config of unfolded norms": Fault(
        config_says_otherwise, "norms", "blocks.0.ln1",
        ("cannot be RMSNormPre where cfg.normalization_type is 'RMS'", "correct the config"), None,
    ),
    "a norm of another class": Fault(
        a_norm_is_another, "norms", "blocks.2.ln2", ("LayerNormPre", "'RMSPre'"), None
    ),
}  # fmt: skip

MISPLACED = (block_moved, parameter_replaced, some_parameters_moved, home_renamed)
"""What a repair brings back."""

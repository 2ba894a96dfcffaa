"""Blocks, and components of blocks, that nobody listens in: their rank runs each by one command."""

from __future__ import annotations

from typing import Any

import torch

from tl_devicefix.attention.implementation import is_sdpa
from tl_devicefix.hooked_transformer.known_blocks import (
    Look,
    fits,
    look_at,
    why_as_installed,
    why_attention_as_installed,
)
from tl_devicefix.multihost.blocks import run_whole


def block_whole(
    block: Any,
    resid_pre: torch.Tensor,
    shortformer_pos_embed: torch.Tensor | None,
    entry: Any,
    attention_mask: torch.Tensor | None,
    look: Look,
) -> torch.Tensor | None:
    """What a block gives, run by the rank that has it; None if somebody looks into it."""
    if (
        look.is_heard()
        or why_as_installed(block, look) is not None
        or why_attention_as_installed(block.attn, look) is not None
        or not _may_be_whole(block.attn, (resid_pre,) * 3, entry)
    ):
        return None
    inputs = {
        "resid_pre": resid_pre,
        "shortformer_pos_embed": shortformer_pos_embed,
        "attention_mask": attention_mask,
    }
    return run_whole(block, inputs, entry)


def _may_be_whole(attn: Any, inputs: Any, entry: Any) -> bool:
    """Whether attention leaves nothing in its module, and no cache grows in place, here."""
    return (
        attn.cfg.positional_embedding_type != "alibi"
        and (entry is None or not is_sdpa(attn))
        and fits(attn, inputs, entry)
    )


def attention_whole(
    attn: Any,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    entry: Any,
    attention_mask: torch.Tensor | None,
) -> torch.Tensor | None:
    """What attention gives, run by the rank that has it; None if somebody looks into it."""
    if not _may_be_whole(attn, inputs, entry):
        return None
    look_at(attn)  # which leaves something in it, as a forward does
    names = "query_input", "key_input", "value_input"
    return run_whole(attn, {**dict(zip(names, inputs)), "attention_mask": attention_mask}, entry)


def component_whole(component: Any, x: torch.Tensor, is_norm: bool = False) -> torch.Tensor | None:
    """What an MLP or a norm gives, run by the rank that has it; None if somebody looks into it.

    A norm reads the residual stream several times, as others do beside it. Their gradients are
    added one by one, and rounded each time: so it is not run by one command then.
    """
    if x.dim() != 3 or (is_norm and torch.is_grad_enabled() and x.requires_grad):
        return None  # with heads, or added to
    return run_whole(component, {"x": x})

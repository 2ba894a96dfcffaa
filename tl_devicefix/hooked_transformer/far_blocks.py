"""What nobody listens to, a block or one of its components, its rank runs whole."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tl_devicefix.attention.implementation import is_sdpa
from tl_devicefix.hooked_transformer.known_blocks import look_at
from tl_devicefix.multihost.whole import run_whole


def block_whole(
    block: Any,
    resid_pre: torch.Tensor,
    shortformer_pos_embed: torch.Tensor | None,
    entry: Any,
    attention_mask: torch.Tensor | None,
    run_here: Any,
) -> torch.Tensor | None:
    """What a block gives, run by the rank that has it; None if somebody looks into it."""
    if entry is not None and is_sdpa(block.attn):
        return None  # it grows in place, here
    given = {
        "resid_pre": resid_pre,
        "shortformer_pos_embed": shortformer_pos_embed,
        "attention_mask": attention_mask,
    }
    return run_whole(block, given, entry, functools.partial(run_here, block))


def attention_whole(
    attn: Any,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    entry: Any,
    attention_mask: torch.Tensor | None,
    run_here: Callable[..., torch.Tensor],
) -> torch.Tensor | None:
    """What attention gives, run by the rank that has it; None if somebody looks into it."""
    if entry is not None and is_sdpa(attn):
        return None  # it grows in place, here
    look_at(attn)  # which leaves something in it, as a forward does
    names = "query_input", "key_input", "value_input"
    given = {**dict(zip(names, inputs)), "attention_mask": attention_mask}

    def sequential(attention_mask: torch.Tensor | None, **named: torch.Tensor) -> torch.Tensor:
        return run_here(attn, tuple(named[each] for each in names), None, attention_mask)

    return run_whole(attn, given, entry, sequential)


def component_whole(component: Any, x: torch.Tensor, is_norm: bool = False) -> torch.Tensor | None:
    """What an MLP or a norm gives, run by the rank that has it; None if somebody looks into it.

    A norm reads the residual stream several times, as others do beside it. Their gradients are
    added one by one, and rounded each time: so it is not run whole then.
    """
    if x.dim() != 3 or (is_norm and torch.is_grad_enabled() and x.requires_grad):
        return None  # with heads, or added to
    run_here = functools.partial(type(component).forward, component)
    return run_whole(component, {"x": x}, None, run_here)

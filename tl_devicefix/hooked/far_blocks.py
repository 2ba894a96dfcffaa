"""What nobody listens to, a block or one of its components, its rank runs whole."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from transformer_lens.components import AbstractAttention, TransformerBlock

from tl_devicefix.attending.choosing import is_chosen
from tl_devicefix.hosts.whole import run_whole
from tl_devicefix.patching.applying import original
from tl_devicefix.simulation.tensor import SimTensor


def block_forward(
    self: Any,
    resid_pre: torch.Tensor,
    shortformer_pos_embed: torch.Tensor | None = None,
    past_kv_cache_entry: Any = None,
    attention_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """`TransformerBlock.forward`, run by the rank that has the block if nobody looks into it."""
    given = {
        "resid_pre": resid_pre,
        "shortformer_pos_embed": shortformer_pos_embed,
        "attention_mask": attention_mask,
    }
    entry = past_kv_cache_entry
    run_here = original(TransformerBlock, "forward")
    if _is_far(resid_pre) and (entry is None or not is_chosen(self.attn)):  # or it grows in place
        made = run_whole(self, given, entry, functools.partial(run_here, self))
        if made is not None:
            return made
    output: torch.Tensor = run_here(self, **given, past_kv_cache_entry=entry)
    return output


def attention_whole(
    attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor | None:
    """What attention gives, run by the rank that has it; None if somebody looks into it."""
    given = {**dict(zip(_OF_ATTENTION, args)), **kwargs}
    if not _is_far(given.get("query_input")):
        return None
    entry = given.pop("past_kv_cache_entry", None)
    if entry is not None and is_chosen(attention):
        return None  # it grows in place, here
    given = {"query_input": given.pop("query_input"), **given}
    run_here = functools.partial(original(AbstractAttention, "forward"), attention)
    return run_whole(attention, given, entry, run_here)


_OF_ATTENTION = tuple(inspect.signature(AbstractAttention.forward).parameters)[1:]


def component_forward(cls: type, is_norm: bool) -> Any:
    """`forward` of an MLP or a norm, run by the rank that has it if nobody looks into it.

    Args:
        cls: its class, whose forward takes one tensor and gives one of its shape.
        is_norm: whether it reads the residual stream several times, as others do beside it. Their
            gradients are added one by one, and rounded each time: so it is not run whole then.
    """

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        run_here = original(cls, "forward")
        is_added_to = is_norm and torch.is_grad_enabled() and x.requires_grad
        # [batch, pos, d_model], and not with heads
        if _is_far(x) and x.dim() == 3 and not is_added_to:
            made = run_whole(self, {"x": x}, None, functools.partial(run_here, self))
            if made is not None:
                return made
        output: torch.Tensor = run_here(self, x)
        return output

    return forward


def _is_far(x: Any) -> bool:
    return type(x) is SimTensor

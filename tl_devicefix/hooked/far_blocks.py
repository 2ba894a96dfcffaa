"""What nobody listens to, a block or its attention or MLP, its rank runs whole."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from transformer_lens.components import MLP, AbstractAttention, GatedMLP, TransformerBlock

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
    run_here = functools.partial(original(TransformerBlock, "forward"), self)
    is_far = type(resid_pre) is SimTensor
    if is_far and (entry is None or not is_chosen(self.attn)):  # or it grows in place, here
        made = run_whole(self, given, entry, run_here)
        if made is not None:
            return made
    output: torch.Tensor = run_here(**given, past_kv_cache_entry=entry)
    return output


def attention_whole(
    attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor | None:
    """What attention gives, run by the rank that has it; None if somebody looks into it."""
    given = {**dict(zip(_OF_ATTENTION, args)), **kwargs}
    if type(given.get("query_input")) is not SimTensor:
        return None
    entry = given.pop("past_kv_cache_entry", None)
    if entry is not None and is_chosen(attention):
        return None  # it grows in place, here
    given = {"query_input": given.pop("query_input"), **given}
    run_here = functools.partial(original(AbstractAttention, "forward"), attention)
    return run_whole(attention, given, entry, run_here)


_OF_ATTENTION = tuple(inspect.signature(AbstractAttention.forward).parameters)[1:]


def mlp_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    """`MLP.forward`, run by the rank that has the MLP if nobody looks into it."""
    return _mlp(MLP, self, x)


def gated_mlp_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    """`GatedMLP.forward`, run by the rank that has the MLP if nobody looks into it."""
    return _mlp(GatedMLP, self, x)


def _mlp(cls: type, mlp: Any, x: torch.Tensor) -> torch.Tensor:
    run_here = functools.partial(original(cls, "forward"), mlp)
    made = run_whole(mlp, {"x": x}, None, run_here) if type(x) is SimTensor else None
    output: torch.Tensor = run_here(x) if made is None else made
    return output

"""Blocks of another rank that nobody listens to: the rank runs them whole."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformer_lens.components import TransformerBlock

from tl_devicefix.attending.choosing import is_chosen
from tl_devicefix.hosts.whole import run_whole
from tl_devicefix.patching.applying import original


def forward(
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
    if entry is None or not is_chosen(self.attn):  # or it grows in place, here
        made = run_whole(self, given, entry, run_here)
        if made is not None:
            return made
    output: torch.Tensor = run_here(**given, past_kv_cache_entry=entry)
    return output

"""Blocks of another rank that nobody listens to: the rank runs them whole."""

from __future__ import annotations

from typing import Any

import torch
from transformer_lens.components import TransformerBlock

from tl_devicefix.attending.choosing import is_chosen
from tl_devicefix.hosts.modules import run_elsewhere, runs_elsewhere
from tl_devicefix.patching.applying import original


def forward(
    self: Any,
    resid_pre: torch.Tensor,
    shortformer_pos_embed: torch.Tensor | None = None,
    past_kv_cache_entry: Any = None,
    attention_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """`TransformerBlock.forward`, run by the rank that has the block if nobody looks into it."""
    options = {
        "shortformer_pos_embed": shortformer_pos_embed,
        "attention_mask": attention_mask,
    }
    entry = past_kv_cache_entry
    is_left = entry is not None and is_chosen(self.attn)  # grows in place, here
    if not is_left and runs_elsewhere(self, resid_pre):
        made = run_elsewhere(self, resid_pre, options, entry)  # type: ignore[arg-type]
        if made is not None:
            return made
    output: torch.Tensor = original(TransformerBlock, "forward")(
        self, resid_pre, past_kv_cache_entry=past_kv_cache_entry, **options
    )
    return output

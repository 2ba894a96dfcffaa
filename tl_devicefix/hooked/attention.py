"""A HookedTransformer's attention, which builds no scores where nobody listens.

TransformerLens's own forward runs, with its hook points. Of its methods, those that would build
what is as large as queries times keys ask first whether the block may do without.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from types import CodeType
from typing import Any

import torch
from transformer_lens.components import AbstractAttention, GroupedQueryAttention

from tl_devicefix.attending.choosing import goes_without_scores, is_chosen
from tl_devicefix.attending.growing import GrowingEntry, rotated_once
from tl_devicefix.attending.known import one_forward
from tl_devicefix.attending.listening import listens
from tl_devicefix.attending.masks import Causal, causal, is_causal_mask
from tl_devicefix.attending.promises import build
from tl_devicefix.attending.scores import Parts, Scores, can_mix, is_promise, mix, promise, see
from tl_devicefix.hooked.far_blocks import attention_whole
from tl_devicefix.patching.applying import original
from tl_devicefix.running import forward as running


def forward_of_model(self: Any, *args: Any, **kwargs: Any) -> Any:
    """`HookedTransformer.forward`, whose results are at home; its blocks know it for one forward.

    Raises:
        RuntimeError: if the model's weights are only partly processed.
    """
    with one_forward() if is_chosen(self) else contextlib.nullcontext():
        return running.forward(self, *args, **kwargs)


def forward(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`AbstractAttention.forward`, which appends to a KV cache in place, or runs whole far away."""
    made = attention_whole(self, args, kwargs)
    if made is not None:
        return made
    run = original(AbstractAttention, "forward")
    if not is_chosen(self):
        output: torch.Tensor = run(self, *args, **kwargs)
        return output
    entry = kwargs.get("past_kv_cache_entry")
    if entry is not None and _appends_as_ever(entry):
        kwargs["past_kv_cache_entry"] = GrowingEntry(entry)
    output = run(self, *args, **kwargs)
    return output


def _appends_as_ever(entry: Any) -> bool:
    return type(entry).append.__module__.partition(".")[0] == "transformer_lens"


def apply_rotary(
    self: Any,
    x: torch.Tensor,
    past_kv_pos_offset: int = 0,
    attention_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """`apply_rotary`, which rotates keys of a KV cache once."""
    run = original(AbstractAttention, "apply_rotary")
    rotated: torch.Tensor | None = None
    if past_kv_pos_offset == 0 and is_chosen(self):

        def rotate(part: torch.Tensor, offset: int) -> torch.Tensor:
            some: torch.Tensor = run(self, part, offset, attention_mask)
            return some

        rotated = rotated_once(self, x, attention_mask, rotate)
    if rotated is None:
        rotated = run(self, x, past_kv_pos_offset, attention_mask)
    return rotated


def calculate_attention_scores(self: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """`Attention.calculate_attention_scores`, which promises scores if nobody looks at them."""
    return _scores(AbstractAttention, self, q, k)


def calculate_grouped_attention_scores(self: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """`GroupedQueryAttention.calculate_attention_scores`, which then repeats no keys either."""
    return _scores(GroupedQueryAttention, self, q, k)


def _scores(cls: type, attention: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    run = original(cls, "calculate_attention_scores")
    asking = sys._getframe(2).f_code
    if not is_chosen(attention) or not _may_promise(attention, run, asking, q, k):
        built: torch.Tensor = run(attention, q, k)
        return built
    parts = Parts(q.transpose(1, 2), k.transpose(1, 2), 1 / attention.attn_scale)
    return promise(parts, lambda: run(attention, q, k))


def _may_promise(
    attention: Any, run: Any, asking: CodeType, q: torch.Tensor, k: torch.Tensor
) -> bool:
    """Whether TransformerLens's forward asks for scores that need not be built."""
    # Whoever else asks, a user's hook or an overriding method, wants scores.
    if asking is not inspect.unwrap(original(AbstractAttention, "forward")).__code__:
        return False
    if original(type(attention), "calculate_attention_scores") is not run:
        return False
    return goes_without_scores(attention) and _can_promise(attention, q, k)


def _can_promise(attention: Any, q: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether they are [batch, pos, head_index, d_head], of one batch, with heads in groups."""
    if q.dim() != 4 or k.dim() != 4 or q.dtype != k.dtype or q.device != k.device:
        return False
    is_grouped = isinstance(attention, GroupedQueryAttention)
    repeats = is_grouped and not attention.cfg.ungroup_grouped_query_attention
    n_heads = k.shape[2] * (attention.repeat_kv_heads if repeats else 1)
    same = q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]
    return same and q.shape[2] == n_heads and q.is_floating_point()


def apply_causal_mask(
    self: Any,
    attn_scores: torch.Tensor,
    past_kv_pos_offset: int = 0,
    attention_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """`apply_causal_mask`, which makes no mask for scores that are only promised."""
    run = original(AbstractAttention, "apply_causal_mask")

    def apply(scores: torch.Tensor) -> torch.Tensor:
        masked: torch.Tensor = run(self, build(scores), past_kv_pos_offset, attention_mask)
        return masked

    if is_promise(attn_scores):
        seen = _seen(self, attn_scores, past_kv_pos_offset, attention_mask)
        if seen is not None:
            return see(attn_scores, apply, seen)
    return apply(attn_scores)


def _seen(
    attention: Any, scores: Scores, offset: int, padding: torch.Tensor | None
) -> Causal | None:
    """The mask that TransformerLens would make, if it is one that is known."""
    batch, _, n_queries, n_keys = scores.shape
    if n_queries + offset != n_keys:
        return None
    if padding is not None and (
        padding.shape not in ((batch, n_keys), (1, n_keys)) or padding.device != scores.device
    ):
        return None
    window = attention.cfg.window_size if attention.attn_type == "local" else None
    if hasattr(AbstractAttention, "_make_causal_mask"):
        return causal(offset, padding, window)
    mask = attention.mask  # of TransformerLens 2: a buffer, which people edit
    if mask.device != scores.device or n_keys > mask.shape[0]:
        return None
    if is_causal_mask(mask, window):
        return causal(offset, padding, window)
    return Causal(offset, padding, edited=mask[-n_queries:, -n_keys:])


def calculate_z_scores(self: Any, v: torch.Tensor, pattern: torch.Tensor) -> torch.Tensor:
    """`Attention.calculate_z_scores`, by SDPA for a pattern that is only promised."""
    return _z_scores(AbstractAttention, self, v, pattern)


def calculate_grouped_z_scores(self: Any, v: torch.Tensor, pattern: torch.Tensor) -> torch.Tensor:
    """`GroupedQueryAttention.calculate_z_scores`, which then repeats no values either."""
    return _z_scores(GroupedQueryAttention, self, v, pattern)


def _z_scores(cls: type, attention: Any, v: torch.Tensor, pattern: torch.Tensor) -> torch.Tensor:
    if is_promise(pattern) and can_mix(pattern, by_head := v.transpose(1, 2)):
        mixed = mix(pattern, by_head, is_edited=listens(attention.hook_z))
        z: torch.Tensor = attention.hook_z(mixed.transpose(1, 2))
    else:
        z = original(cls, "calculate_z_scores")(attention, v, build(pattern))
    return z

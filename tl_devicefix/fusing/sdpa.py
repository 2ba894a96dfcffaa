"""TransformerLens's attention by `scaled_dot_product_attention`, without a pattern."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch.nn.attention import SDPBackend

Mask = Bool[torch.Tensor, "batch 1 query_pos key_pos"]


def unmask_empty_rows(mask: Mask) -> Mask:
    """Let a query that sees no key see all of them.

    Only padding rows see none. A kernel may return NaN for these, and in later blocks other rows
    would get NaN too: zero times NaN is NaN.
    """
    return mask | ~mask.any(dim=-1, keepdim=True)


def attend(
    q: Float[torch.Tensor, "batch head_index query_pos d_head"],
    k: Float[torch.Tensor, "batch kv_head_index key_pos d_head"],
    v: Float[torch.Tensor, "batch kv_head_index key_pos d_head"],
    scale: float,
    mask: Mask | None,
    is_causal: bool,
    bias: Float[torch.Tensor, "head_index query_pos key_pos"] | None = None,
) -> Float[torch.Tensor, "batch head_index query_pos d_head"]:
    """Return the values of each head, mixed as its pattern would mix them.

    Scores are multiplied by `scale`, and then `bias` is added. Without a mask, a query sees all
    keys, or if `is_causal`, the keys up to its own.
    """
    dtype, attn_mask = v.dtype, mask
    if bias is not None:
        if is_causal:  # SDPA takes no bias with it
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril_()
        if dtype.itemsize < 4:
            q, k, v = q.float(), k.float(), v.float()  # 16 bits are too few for the bias
        bias = bias.to(v.dtype)[None]  # [1, head_index, query_pos, key_pos]
        attn_mask = bias if mask is None else torch.where(mask, bias, -torch.inf)
        is_causal = False
    if not q.dtype == k.dtype == v.dtype:  # a hook may have changed one
        q, k = q.to(v.dtype), k.to(v.dtype)
    groups = q.shape[1] // k.shape[1]
    enable_gqa = groups > 1
    if enable_gqa:
        choose: Any = torch._fused_sdp_choice  # its stub lacks the optional arguments
        choice = choose(q, k, v, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=True)
        # If torch chooses the kernel that builds scores, repeat the keys: another may then run.
        if choice == SDPBackend.MATH.value:
            enable_gqa = False
            k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))  # [batch, head_index, ...]
    z = F.scaled_dot_product_attention(
        q, k, v, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )  # [batch, head_index, query_pos, d_head]
    return z if z.dtype == dtype else z.to(dtype)

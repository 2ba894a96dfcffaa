"""Attention by `scaled_dot_product_attention`, as TransformerLens computes it by a pattern."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch.nn.attention import SDPBackend

Mask = Bool[torch.Tensor, "batch 1 query_pos key_pos"]


def without_blind_rows(mask: Mask) -> Mask:
    """Let a query that sees no key see all, because a kernel may make NaN of the mean of nothing.

    Only rows of padding see none. NaN there would reach other rows, as zero times NaN is NaN.
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

    Scores are multiplied with `scale`, and then `bias` is added. Without a mask, a query sees all
    keys, or if `is_causal` those up to its own.
    """
    dtype = v.dtype
    if bias is not None and dtype.itemsize < 4:
        q, k, v = q.float(), k.float(), v.float()  # because 16 bits do not hold what is added
    if not q.dtype == k.dtype == v.dtype:
        q, k = q.to(v.dtype), k.to(v.dtype)
    if bias is not None:
        if is_causal:
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril_()
        bias = bias.to(v.dtype)[None]
        # A copy, because a backward cannot save what was made in inference mode.
        mask = bias if mask is None else torch.where(mask, bias, -torch.inf)
        is_causal = False
    options: dict[str, Any] = {"attn_mask": mask, "is_causal": is_causal, "scale": scale}
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        # Where torch would build the scores, it would also repeat keys by itself.
        choose: Any = torch._fused_sdp_choice  # its stub lacks the optional arguments
        choice = choose(q, k, v, mask, 0.0, is_causal, scale=scale, enable_gqa=True)
        if choice != SDPBackend.MATH.value:
            options["enable_gqa"] = True
        else:
            k, v = (tensor.repeat_interleave(groups, dim=1) for tensor in (k, v))
    z = F.scaled_dot_product_attention(q, k, v, **options)
    return z if z.dtype == dtype else z.to(dtype)

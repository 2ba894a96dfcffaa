"""Attention by `scaled_dot_product_attention`, as TransformerLens computes it by a pattern."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch.nn.attention import SDPBackend


class Seen(NamedTuple):
    """Which keys each query sees.

    Attributes:
        mask: True where one does, and in all of the row of a query that sees none, so that no
            kernel is asked for the mean of nothing; None where each sees all up to its own.
        blind: the queries that see none; None if there can be none.
    """

    mask: Bool[torch.Tensor, "batch 1 query_pos key_pos"] | None
    blind: Bool[torch.Tensor, "batch 1 query_pos 1"] | None


def seen_by(mask: torch.Tensor | None, can_be_blind: bool) -> Seen:
    """Convert a mask for SDPA."""
    if mask is None or not can_be_blind:
        return Seen(mask, None)
    blind = ~mask.any(dim=-1, keepdim=True)
    return Seen(mask | blind, blind)


def attend(
    q: Float[torch.Tensor, "batch head_index query_pos d_head"],
    k: Float[torch.Tensor, "batch kv_head_index key_pos d_head"],
    v: Float[torch.Tensor, "batch kv_head_index key_pos d_head"],
    scale: float,
    seen: Seen | None,
    bias: Float[torch.Tensor, "head_index query_pos key_pos"] | None = None,
) -> Float[torch.Tensor, "batch head_index query_pos d_head"]:
    """The values of each head, mixed as its pattern would; all keys are seen if `seen` is None.

    Scores are multiplied with `scale`, and then `bias` is added.
    """
    dtype = v.dtype
    if bias is not None and dtype.itemsize < 4:
        q, k, v = q.float(), k.float(), v.float()  # as 16 bits do not hold what is added
    if not q.dtype == k.dtype == v.dtype:
        q, k = q.to(v.dtype), k.to(v.dtype)
    mask = None if seen is None else seen.mask
    is_causal = seen is not None and mask is None and q.shape[2] > 1
    if bias is not None:
        if is_causal:
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril_()
        bias = bias.to(v.dtype)[None]
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
    if seen is not None and seen.blind is not None:
        z = z.masked_fill(seen.blind, 0.0)
    return z if z.dtype == dtype else z.to(dtype)


def why_not_here() -> str | None:
    """What torch is doing that `scaled_dot_product_attention` has no derivatives or rules for."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "within a transform of torch.func"
    if torch.autograd.forward_ad._current_level >= 0:
        return "within forward-mode autograd"
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return "while it is compiled"
    return None

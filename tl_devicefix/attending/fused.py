"""Attention by `scaled_dot_product_attention`, as TransformerLens computes it by a pattern."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from tl_devicefix.attending.masks import Causal


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    causal: Causal | None,
    biases: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """The values of each head, mixed as its pattern would: [batch, head_index, query_pos, d_head].

    Args:
        q: [batch, head_index, query_pos, d_head].
        k: [batch, kv_head_index, key_pos, d_head].
        v: of k's heads and positions.
        scale: what scores are multiplied with.
        causal: which keys are seen; all if None.
        biases: what is added to the scores, each broadcast to [batch, head_index, query_pos,
            key_pos].
    """
    dtype = v.dtype
    if biases and dtype.itemsize < 4:
        q, k, v = q.float(), k.float(), v.float()  # as 16 bits do not hold what is added
    q, k = q.to(v.dtype), k.to(v.dtype)
    n_queries, n_keys = q.shape[2], k.shape[2]
    mask = blind = None
    is_implied = causal is not None and causal.is_implied(n_queries, n_keys)
    if causal is not None and not (is_implied and not biases):
        mask, blind = causal.seen(n_queries, n_keys, q.device)
    if biases:
        mask = _added(biases, mask, q.dtype)
    z = _fused(q, k, v, mask, mask is None and is_implied and n_queries > 1, scale)
    if blind is not None and causal is not None:
        z = _of_the_blind(z, blind, v) if causal.blind_mixes_all else z.masked_fill(blind, 0.0)
    return z.to(dtype)


def _of_the_blind(z: torch.Tensor, blind: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Give queries that see no key the mean of all values, as a mask of the lowest number does."""
    mean = v.mean(dim=2, keepdim=True)
    return torch.where(blind, mean.repeat_interleave(z.shape[1] // v.shape[1], dim=1), z)


def _added(
    biases: Sequence[torch.Tensor], mask: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    total = sum(biases[1:], biases[0]).to(dtype)
    while total.dim() < 4:
        total = total[None]
    return total if mask is None else torch.where(mask, total, -torch.inf)


def _fused(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float,
) -> torch.Tensor:
    options: dict[str, Any] = {"attn_mask": mask, "is_causal": is_causal, "scale": scale}
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        if _takes_groups(q, k, v, options):
            options["enable_gqa"] = True
        else:
            k, v = (each.repeat_interleave(groups, dim=1) for each in (k, v))
    return F.scaled_dot_product_attention(q, k, v, **options)


def _takes_groups(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]
) -> bool:
    """Whether keys and values may be fewer than queries: not where torch would build the scores."""
    choose: Any = torch._fused_sdp_choice  # its stub lacks the optional arguments
    mask, is_causal = options["attn_mask"], options["is_causal"]
    choice = choose(q, k, v, mask, 0.0, is_causal, scale=options["scale"], enable_gqa=True)
    return bool(choice != SDPBackend.MATH.value)

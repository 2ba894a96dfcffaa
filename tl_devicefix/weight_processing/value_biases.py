"""Fold the value biases into the attention output bias.

Attention patterns sum to 1, so a head's value bias adds the constant `b_V @ W_O` to the layer's
output: `b_O' = b_O + sum over heads of b_V[h] @ W_O[h]` and `b_V' = 0`. See
`HookedTransformer.fold_value_biases`.
"""

from __future__ import annotations

import einops
import torch
from jaxtyping import Float

from tl_devicefix.weight_processing.weights import Weights


def fold_value_biases_of_block(block: Weights) -> None:
    """Fold one block's value biases into its b_O, in place.

    Args:
        block: one block's weights; "attn.b_V" [heads, d_head], or "attn._b_V"
            [key_value_heads, d_head] with grouped-query attention, "attn.W_O"
            [heads, d_head, d_model] and "attn.b_O" [d_model].
    """
    name = "attn._b_V" if "attn._b_V" in block else "attn.b_V"
    if name not in block:
        return
    W_O: Float[torch.Tensor, "heads d_head d_model"] = block["attn.W_O"]
    b_V = block[name]
    # With grouped-query attention several heads share one value head.
    b_V_of_head = b_V.repeat_interleave(W_O.shape[0] // b_V.shape[0], dim=0)
    block["attn.b_O"] = block["attn.b_O"] + einops.einsum(
        b_V_of_head, W_O, "heads d_head, heads d_head d_model -> d_model"
    )
    block[name] = torch.zeros_like(b_V)

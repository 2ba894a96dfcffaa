"""Make the factors of QK and OV even, so that their rows or columns are orthogonal.

From the singular value decomposition `W_OV = U S Vh`: `W_V' = U S` and `W_O' = Vh`, and
`W_Q' = U sqrt(S)`, `W_K' = V sqrt(S)` from `W_QK = U S Vh`, with the query and key biases carried
as one more input dimension. See `HookedTransformer.refactor_factored_attn_matrices`.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from transformer_lens import FactoredMatrix

from tl_devicefix.weight_processing.value_biases import fold_value_biases_of_block
from tl_devicefix.weight_processing.weights import Weights


def refactor_attention_of_block(block: Weights) -> None:
    """Refactor one block's W_Q, W_K, b_Q, b_K, W_V and W_O, in place.

    Not for rotary embeddings (QK then depends on the positions) nor grouped-query attention.

    Args:
        block: one block's weights; the matrices are [heads, d_model, d_head], W_O
            [heads, d_head, d_model].
    """
    W_Q = _with_bias_as_input(block["attn.W_Q"], block["attn.b_Q"])
    W_K = _with_bias_as_input(block["attn.W_K"], block["attn.b_K"])
    even_Q, even_K_T = FactoredMatrix(W_Q, W_K.transpose(-1, -2)).make_even().pair
    even_K = even_K_T.transpose(-1, -2)
    block["attn.W_Q"], block["attn.b_Q"] = even_Q[:, :-1, :], even_Q[:, -1, :]
    block["attn.W_K"], block["attn.b_K"] = even_K[:, :-1, :], even_K[:, -1, :]

    fold_value_biases_of_block(block)
    U, S, Vh = FactoredMatrix(block["attn.W_V"], block["attn.W_O"]).svd()
    block["attn.W_V"] = U @ S.diag_embed()
    block["attn.W_O"] = Vh.transpose(-1, -2)


def _with_bias_as_input(
    weight: Float[torch.Tensor, "heads d_model d_head"],
    bias: Float[torch.Tensor, "heads d_head"],
) -> Float[torch.Tensor, "heads d_model_plus_1 d_head"]:
    return torch.cat([weight, bias[:, None, :]], dim=1)

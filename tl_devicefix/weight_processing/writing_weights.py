"""Centre the weights that write to the residual stream.

Every reader of the residual stream begins by subtracting the mean (LayerNorm), so the mean over
d_model of what is written does not matter and may be removed. See
`HookedTransformer.center_writing_weights`. Not for RMSNorm, which keeps the mean.
"""

from __future__ import annotations

from tl_devicefix.weight_processing.weights import Weights

_WRITERS = ("attn.W_O", "attn.b_O", "mlp.W_out", "mlp.b_out")


def center_writing_weights_of_block(block: Weights) -> None:
    """Centre W_O, b_O, W_out and b_out of one block over d_model (their last axis), in place."""
    for name in _WRITERS:
        if name in block:
            _center(block, name)
    for name in block:
        # Experts are nn.Linear: weight [d_model, d_mlp], bias [d_model].
        if name.startswith("mlp.experts.") and name.endswith("W_out.weight"):
            block[name] -= block[name].mean(dim=0, keepdim=True)
        elif name.startswith("mlp.experts.") and name.endswith("W_out.bias"):
            _center(block, name)


def center_embedding(embedding: Weights) -> None:
    """Centre W_E [d_vocab, d_model] or W_pos [n_ctx, d_model] over d_model, in place."""
    for name in ("embed.W_E", "pos_embed.W_pos"):
        if name in embedding:
            _center(embedding, name)


def center_attention_bias(block: Weights) -> None:
    """Centre b_O [d_model] of one block, in place."""
    _center(block, "attn.b_O")


def _center(weights: Weights, name: str) -> None:
    weights[name] -= weights[name].mean(dim=-1, keepdim=True)

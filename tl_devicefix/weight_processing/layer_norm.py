"""Fold a norm's weight and bias into the matrices that read its output.

For `LN(x) = (x - mean) / std * w + b` followed by `@ W + b_W`, the folded matrix is
`W' = w[:, None] * W` and the folded bias `b_W' = b_W + b @ W`; as the normalised x has mean zero,
W' may also be centred over d_model. RMSNorm has no bias and does not centre. See "A Mathematical
Framework for Transformer Circuits" and `HookedTransformer.fold_layer_norm`.
"""

from __future__ import annotations

import einops
import torch
from jaxtyping import Float

from tl_devicefix.weight_processing.weights import Weights

_QKV = ("Q", "K", "V")


def fold_layer_norm_into_block(
    block: Weights, *, fold_biases: bool, center_weights: bool, keep_norms: bool
) -> None:
    """Fold ln1 into attention, ln2 into the MLP, and SoLU's inner norm into W_out, in place.

    Args:
        block: one block's weights, by their names within the block ("ln1.w", "attn.W_Q").
        fold_biases: fold the norms' biases (False for RMSNorm).
        center_weights: centre the reading matrices afterwards (False for RMSNorm).
        keep_norms: leave an identity norm behind, as TransformerLens 3 does, instead of removing
            the norm's weights, as 2 does.
    """
    if "ln1.w" in block:
        for letter in _QKV:
            # Grouped-query attention keeps its keys and values under an underscore.
            underscore = "" if f"attn.W_{letter}" in block else "_"
            weight, bias = f"attn.{underscore}W_{letter}", f"attn.{underscore}b_{letter}"
            _fold_into_heads(block, weight, bias, fold_biases, center_weights)
        _retire(block, "ln1", keep_norms)
    if "ln2.w" in block:
        if any(name.startswith("mlp.experts.") for name in block):
            _fold_into_experts(block)
        else:
            _fold_into_mlp(block, fold_biases, center_weights)
        _retire(block, "ln2", keep_norms)
    if "mlp.ln.w" in block:
        _fold_into_rows(block, "mlp.ln", "mlp.W_out", "mlp.b_out", fold_biases, center_weights)
        _retire(block, "mlp.ln", keep_norms)


def fold_layer_norm_into_unembed(
    head: Weights, *, fold_biases: bool, center_weights: bool, keep_norms: bool
) -> None:
    """Fold ln_final into the unembedding, in place.

    Args:
        head: "ln_final.w", perhaps "ln_final.b", "unembed.W_U" [d_model, d_vocab], "unembed.b_U".
        fold_biases: fold ln_final's bias (False for RMSNorm, and where `cfg.final_rms` is set).
        center_weights: centre W_U over d_model afterwards (False for RMSNorm).
        keep_norms: as in `fold_layer_norm_into_block`.
    """
    if "ln_final.w" not in head:
        return
    _fold_into_rows(head, "ln_final", "unembed.W_U", "unembed.b_U", fold_biases, center_weights)
    _retire(head, "ln_final", keep_norms, with_bias=fold_biases)


def _fold_into_heads(
    block: Weights, weight: str, bias: str, fold_biases: bool, center_weights: bool
) -> None:
    matrix: Float[torch.Tensor, "heads d_model d_head"] = block[weight]
    if fold_biases and "ln1.b" in block:
        block[bias] = block[bias] + einops.einsum(
            matrix, block["ln1.b"], "heads d_model d_head, d_model -> heads d_head"
        )
    matrix *= block["ln1.w"][None, :, None]
    if center_weights:
        matrix -= matrix.mean(dim=1, keepdim=True)


def _fold_into_mlp(block: Weights, fold_biases: bool, center_weights: bool) -> None:
    # TransformerLens centres W_in but not W_gate; both read a mean-zero stream, so it is harmless.
    if "mlp.W_gate" in block:
        block["mlp.W_gate"] *= block["ln2.w"][:, None]
    _fold_into_rows(block, "ln2", "mlp.W_in", "mlp.b_in", fold_biases, center_weights)


def _fold_into_rows(
    weights: Weights, norm: str, weight: str, bias: str, fold_biases: bool, center_weights: bool
) -> None:
    """Fold a norm into a matrix whose first dimension is the norm's."""
    matrix: Float[torch.Tensor, "d_in d_out"] = weights[weight]
    if fold_biases and f"{norm}.b" in weights and bias in weights:
        weights[bias] = weights[bias] + weights[f"{norm}.b"] @ matrix
    matrix *= weights[f"{norm}.w"][:, None]
    if center_weights:
        matrix -= matrix.mean(dim=0, keepdim=True)


def _fold_into_experts(block: Weights) -> None:
    """Fold ln2 into the router and every expert: `nn.Linear` weights, so [d_out, d_model]."""
    for name in block:
        leaf = name.removeprefix("mlp.")
        reads = leaf == "W_gate.weight" or leaf.endswith((".W_in.weight", ".W_gate.weight"))
        if name.startswith("mlp.") and reads:
            block[name] *= block["ln2.w"][None, :]


def _retire(weights: Weights, norm: str, keep: bool, with_bias: bool = True) -> None:
    """The norm's weights are folded: remove them, or leave an identity."""
    names = [f"{norm}.w", f"{norm}.b"] if with_bias else [f"{norm}.w"]
    for name in names:
        if name not in weights:
            continue
        if keep:
            weights[name] = torch.full_like(weights[name], float(name.endswith(".w")))
        else:
            del weights[name]

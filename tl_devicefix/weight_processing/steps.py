"""The steps of weight processing: each changes one component's weights in place.

`LN(x) = (x - mean) / std * w + b` followed by `@ W + b_W` is folded as `W' = w[:, None] * W` and
`b_W' = b_W + b @ W`; as the normalised x has mean zero, W' may also be centred over d_model.
RMSNorm has no bias and keeps the mean, so neither its readers nor its writers are centred. See
`HookedTransformer.fold_layer_norm` and the methods after it.
"""

from __future__ import annotations

import einops
import torch
from jaxtyping import Float
from transformer_lens import FactoredMatrix

Weights = dict[str, torch.Tensor]
"""One component's weights by name, on one device. A step may change the dict and its tensors."""


def fold_layer_norm_into_block(
    block: Weights, *, fold_biases: bool, center_weights: bool, keep_norms: bool
) -> None:
    """Fold ln1 into attention, ln2 into the MLP, and SoLU's inner norm into W_out.

    With `center_weights`, the matrices that read the stream are centred afterwards. RMSNorm allows
    neither this nor `fold_biases`. With `keep_norms`, an identity norm stays, as in TransformerLens
    3; TransformerLens 2 removes it.
    """
    if "ln1.w" in block:
        for letter in "QKV":
            # Grouped-query attention's key and value weights have an underscore.
            underscore = "" if f"attn.W_{letter}" in block else "_"
            weight, bias = f"attn.{underscore}W_{letter}", f"attn.{underscore}b_{letter}"
            _fold_norm(block, "ln1", weight, bias, fold_biases, center_weights)
        _retire(block, "ln1", keep_norms)
    if "ln2.w" in block:
        if any(name.startswith("mlp.experts.") for name in block):
            _fold_into_experts(block)
        else:
            # TransformerLens does not centre W_gate; it reads a mean-zero stream anyway.
            if "mlp.W_gate" in block:
                block["mlp.W_gate"] *= block["ln2.w"][:, None]  # [d_model, d_mlp]
            _fold_norm(block, "ln2", "mlp.W_in", "mlp.b_in", fold_biases, center_weights)
        _retire(block, "ln2", keep_norms)
    if "mlp.ln.w" in block:
        _fold_norm(block, "mlp.ln", "mlp.W_out", "mlp.b_out", fold_biases, center_weights)
        _retire(block, "mlp.ln", keep_norms)


def fold_layer_norm_into_unembed(
    head: Weights, *, fold_biases: bool, center_weights: bool, keep_norms: bool
) -> None:
    """Fold ln_final into the unembedding."""
    if "ln_final.w" in head:
        _fold_norm(head, "ln_final", "unembed.W_U", "unembed.b_U", fold_biases, center_weights)
        _retire(head, "ln_final", keep_norms)


def _fold_norm(
    weights: Weights, norm: str, weight: str, bias: str, fold_biases: bool, center_weights: bool
) -> None:
    """Fold a norm into a matrix, or into one matrix for each head."""
    matrix: Float[torch.Tensor, "... d_in d_out"] = weights[weight]
    has_bias = norm == "ln1" or bias in weights  # attention always has biases
    # Fold the bias first: it needs the matrix before the norm's weights scale it.
    if fold_biases and f"{norm}.b" in weights and has_bias:
        weights[bias] = weights[bias] + einops.einsum(
            matrix, weights[f"{norm}.b"], "... d_in d_out, d_in -> ... d_out"
        )
    matrix *= weights[f"{norm}.w"][:, None]  # [... d_in, d_out]
    if center_weights:  # changes no output: LayerNorm's output has mean zero over d_in
        matrix -= matrix.mean(dim=-2, keepdim=True)  # [... 1, d_out]


def _fold_into_experts(block: Weights) -> None:
    """Fold ln2 into the router and every expert: `nn.Linear` weights, so [d_out, d_model]."""
    for name in block:
        if name.startswith("mlp.") and name.endswith(("W_gate.weight", "W_in.weight")):
            block[name] *= block["ln2.w"][None, :]  # [d_out, d_model]


def _retire(weights: Weights, norm: str, keep: bool) -> None:
    """Remove a folded norm's weights, or make it an identity."""
    for name, identity in ((f"{norm}.w", 1.0), (f"{norm}.b", 0.0)):
        if name in weights and keep:
            weights[name] = torch.full_like(weights[name], identity)
        elif name in weights:
            del weights[name]


def center_writing_weights_of_block(block: Weights) -> None:
    """Centre W_O, b_O, W_out and b_out of one block over d_model.

    Every LayerNorm that reads the stream subtracts this mean.
    """
    center(block, "attn.W_O", "attn.b_O", "mlp.W_out", "mlp.b_out")
    for name in block:
        if name.startswith("mlp.experts.") and name.endswith(("W_out.weight", "W_out.bias")):
            center(block, name, dim=0)  # experts are nn.Linear: [d_model, d_mlp], [d_model]


def center(weights: Weights, *names: str, dim: int = -1) -> None:
    """Centre each of the named weights that is present."""
    for name in names:
        if name in weights:
            weights[name] -= weights[name].mean(dim=dim, keepdim=True)


_UNEMBEDDING = ("unembed.W_U", "unembed.b_U")


def center_unembed_weights(head: Weights, means: Weights | None = None) -> None:
    """Centre "unembed.W_U" [d_model, d_vocab] and "unembed.b_U" [d_vocab] over the vocabulary.

    Adding the same number to all logits does not change their softmax. A slice of the vocabulary
    needs the `vocabulary_means`.
    """
    if means is None:
        center(head, *_UNEMBEDDING)
    else:
        for name in means:
            head[name] -= means[name]


def vocabulary_means(
    head: Weights,
    dtype: torch.dtype,
    device: torch.device,
    tokens_at_once: int,
) -> Weights:
    """Return the means over the vocabulary of "unembed.W_U" and "unembed.b_U".

    Their shapes are [d_model, 1] and [1]. They are computed in `dtype` on `device`, to
    which `tokens_at_once` columns are copied at a time.
    """
    means = {}
    for name in _UNEMBEDDING:
        if name in head:
            # Sum in parts: a whole W_U in float32 may not fit on the device.
            parts = head[name].detach().split(tokens_at_once, dim=-1)  # [d_model, some tokens]
            sums = [part.to(device).to(dtype).sum(dim=-1, keepdim=True) for part in parts]
            means[name] = sum(sums[1:], sums[0]) / head[name].shape[-1]
    return means


def fold_value_biases_of_block(block: Weights) -> None:
    """Fold one block's value biases into its b_O.

    A head writes `z @ W_O` with `z = A @ (x @ W_V + b_V)`. Where each row of its pattern A sums to
    1, `A @ b_V` is b_V at every position, so the constant `b_V @ W_O` may move into b_O. It may not

    - with attention sinks, or any softmax with a term besides the keys: a row of A then sums to
      less than 1, and rows differ;
    - if the values or z are changed before W_O: by a norm of the values, or a norm or gate of z.
    """
    name = "attn._b_V" if "attn._b_V" in block else "attn.b_V"
    W_O: Float[torch.Tensor, "heads d_head d_model"] = block["attn.W_O"]
    b_V = block[name]
    # With grouped-query attention several heads share one value head.
    b_V_of_head = b_V.repeat_interleave(W_O.shape[0] // b_V.shape[0], dim=0)  # [heads, d_head]
    block["attn.b_O"] = block["attn.b_O"] + einops.einsum(
        b_V_of_head, W_O, "heads d_head, heads d_head d_model -> d_model"
    )
    block[name] = torch.zeros_like(b_V)


def refactor_attention_of_block(block: Weights) -> None:
    """Make the factors of one block's QK and OV orthogonal.

    With singular value decompositions `U S Vh`:

    - of `W_V W_O`: `W_V' = U S`, `W_O' = Vh`;
    - of `W_Q W_K^T`: `W_Q' = U sqrt(S)`, `W_K' = V sqrt(S)`. The query and key biases are one more
      row of W_Q and W_K, for an input of 1.

    Rotary embeddings (QK depends on the positions) and grouped-query attention are excluded.
    Matrices are [heads, d_model, d_head]; W_O is [heads, d_head, d_model].
    """
    # [heads, d_model + 1, d_head]
    W_Q = _with_bias_as_input(block["attn.W_Q"], block["attn.b_Q"])
    W_K = _with_bias_as_input(block["attn.W_K"], block["attn.b_K"])
    even_Q, even_K_T = FactoredMatrix(W_Q, W_K.transpose(-1, -2)).make_even().pair
    even_K = even_K_T.transpose(-1, -2)  # [heads, d_model + 1, d_head]
    block["attn.W_Q"], block["attn.b_Q"] = even_Q[:, :-1, :], even_Q[:, -1, :]
    block["attn.W_K"], block["attn.b_K"] = even_K[:, :-1, :], even_K[:, -1, :]

    # Fold the value biases into b_O first: they would not fit the new W_O.
    fold_value_biases_of_block(block)
    # Older TransformerLens calls the last one Vh, but it is V: [heads, d_model, d_head]
    U, S, V = FactoredMatrix(block["attn.W_V"], block["attn.W_O"]).svd()
    block["attn.W_V"] = U @ S.diag_embed()
    block["attn.W_O"] = V.transpose(-1, -2)  # [heads, d_head, d_model]


def _with_bias_as_input(
    weight: Float[torch.Tensor, "heads d_model d_head"], bias: Float[torch.Tensor, "heads d_head"]
) -> Float[torch.Tensor, "heads d_model_plus_1 d_head"]:
    return torch.cat([weight, bias[:, None, :]], dim=1)

"""Centre the unembedding over the vocabulary.

Softmax does not change when every logit moves by the same amount, so the mean over the vocabulary
may be removed from W_U and b_U. It changes the logits, not the log probabilities. See
`HookedTransformer.center_unembed`.
"""

from __future__ import annotations

from functools import partial

import torch

from tl_devicefix.weight_processing.weights import ToDevice, Weights

_OVER_VOCABULARY = ("unembed.W_U", "unembed.b_U")


def center_unembed_weights(head: Weights, means: Weights | None = None) -> None:
    """Centre "unembed.W_U" [d_model, d_vocab] and "unembed.b_U" [d_vocab] in place.

    Args:
        head: the weights, or those of a part of the vocabulary.
        means: the means over the whole vocabulary (`vocabulary_means`), if `head` is a part of it.
    """
    for name in _OVER_VOCABULARY:
        if name in head:
            mean = head[name].mean(dim=-1, keepdim=True) if means is None else means[name]
            head[name] -= mean


def vocabulary_means(
    head: Weights,
    dtype: torch.dtype,
    device: torch.device,
    tokens_at_once: int,
    to_device: ToDevice | None = None,
) -> Weights:
    """The means over the vocabulary of "unembed.W_U" (as [d_model, 1]) and "unembed.b_U" (as [1]).

    Args:
        head: the weights, on any device; not changed, nor copied as a whole.
        dtype: the dtype to sum in.
        device: where the means are wanted, and are computed.
        tokens_at_once: how much of the vocabulary is copied to `device` at a time.
        to_device: what copies to `device`; `Tensor.to` by default.
    """
    to_device = to_device or partial(torch.Tensor.to, device=device)
    means = {}
    for name in _OVER_VOCABULARY:
        if name in head:
            parts = head[name].detach().split(tokens_at_once, dim=-1)
            sums = [to_device(p).to(dtype).sum(dim=-1, keepdim=True) for p in parts]
            means[name] = sum(sums[1:], sums[0]) / head[name].shape[-1]
    return means

"""Centre the unembedding over the vocabulary.

Softmax does not change when every logit moves by the same amount, so the mean over the vocabulary
may be removed from W_U and b_U. It changes the logits, not the log probabilities. See
`HookedTransformer.center_unembed`.
"""

from __future__ import annotations

from tl_devicefix.folding.weights import Weights


def center_unembed_weights(head: Weights) -> None:
    """Centre "unembed.W_U" [d_model, d_vocab] and "unembed.b_U" [d_vocab] in place."""
    for name in ("unembed.W_U", "unembed.b_U"):
        if name in head:
            head[name] -= head[name].mean(dim=-1, keepdim=True)

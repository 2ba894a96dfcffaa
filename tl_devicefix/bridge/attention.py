"""A Bridge's attention, which builds no scores where nobody listens.

TransformerLens's own code runs, with its hook points: it is given keys and values that are not
repeated, and scores that are not built (`attending/heads.py:Heads`).
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from transformer_lens.model_bridge.generalized_components import (
    AttentionBridge,
    JointQKVAttentionBridge,
    PositionEmbeddingsAttentionBridge,
)

from tl_devicefix.attending import heads, promises
from tl_devicefix.attending.choosing import goes_without_scores, is_chosen
from tl_devicefix.attending.known import made_once, one_forward
from tl_devicefix.attending.listening import listens
from tl_devicefix.attending.masks import Causal, causal, facts, seen_by
from tl_devicefix.attending.scores import Scores, is_promise, see, soften
from tl_devicefix.bridge.masks import Mask, promised_masks
from tl_devicefix.patching.applying import original
from tl_devicefix.running import forward as running


def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """`TransformerBridge.forward`, whose results are at home; masks are promised to its blocks.

    Raises:
        RuntimeError: if the model's weights are only partly processed.
    """
    with contextlib.ExitStack() as within:
        if is_chosen(self):
            within.enter_context(one_forward())
            within.enter_context(promised_masks())
        return running.forward(self, *args, **kwargs)


def _update_kv_cache(
    self: Any, k: torch.Tensor, v: torch.Tensor, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """`AttentionBridge._update_kv_cache`, after which keys and values are repeated by promise."""
    run = original(AttentionBridge, "_update_kv_cache")
    k, v = run(self, k, v, **kwargs)
    if not goes_without_scores(self) or k.dim() != 4 or k.shape[:3] != v.shape[:3]:
        return k, v
    is_edited = not hasattr(self, "o") or listens(self.o.hook_in)
    return heads.promise(k), heads.promise(v, is_edited)


def _apply_reconstruct_attention_mask(
    self: Any,
    attn_scores: torch.Tensor,
    attention_mask: torch.Tensor | None,
    seq_len: int,
    q_seq_len: int | None = None,
) -> torch.Tensor:
    """The same of `AttentionBridge`, which makes no mask for scores that are only promised."""

    def apply(values: torch.Tensor) -> torch.Tensor:
        run = original(AttentionBridge, "_apply_reconstruct_attention_mask")
        masked: torch.Tensor = run(self, values, attention_mask, seq_len, q_seq_len)
        return masked

    if is_promise(attn_scores) and seq_len == attn_scores.shape[3]:
        known = _known(self, attn_scores, attention_mask)
        if known is not None:
            return see(attn_scores, apply, *known)
    return apply(promises.build(attn_scores))


def _known(
    attention: Any, scores: Scores, mask: torch.Tensor | None
) -> tuple[Causal | None, tuple[torch.Tensor, ...]] | None:
    """What a mask comes to: which keys are seen, and what is added; None if that is not known."""
    n_queries, n_keys = scores.shape[2:]
    if mask is None:
        is_causal = attention.is_causal and not attention.is_cross_attention
        return causal(n_keys - n_queries) if is_causal else None, ()
    if promises.is_promise(mask, Mask) and mask.shape[2:] == (n_queries, n_keys):
        return mask.causal, ()
    if mask.dim() != 4 or mask.requires_grad or mask.device != scores.device:
        return None
    if mask.shape[1:] != (1, n_queries, n_keys):
        if mask.shape[1] != 1 or mask.shape[2] < n_queries or mask.shape[3] < n_keys:
            return None
        whole, part = mask, (..., slice(-n_queries, None), slice(n_keys))
        mask = made_once(whole, ("part", n_queries, n_keys), lambda: whole[part])
    if mask.dtype != torch.bool and not mask.is_floating_point():
        return None
    lowest = torch.finfo(mask.dtype if mask.is_floating_point() else scores.dtype).min
    known = facts(mask, lowest)
    if known.is_causal:
        return causal(n_keys - n_queries), ()
    # Compatibility mode masks with minus infinity, and makes a pattern of that zero. Otherwise a
    # query that sees no key mixes all alike, and its gradients are those of scores that do not
    # count.
    if known.blinds and not attention.compatibility_mode and scores.parts.q.requires_grad:
        return None
    mixes_all = not attention.compatibility_mode
    what = "parts", lowest, known.adds, mixes_all
    return made_once(mask, what, lambda: _parts(mask, lowest, known.adds, mixes_all))


def _parts(
    mask: torch.Tensor, lowest: float, adds: bool, mixes_all: bool
) -> tuple[Causal, tuple[torch.Tensor, ...]]:
    """Which keys are seen by a mask that is added to scores, and what else it adds to them."""
    seen = seen_by(mask, lowest)
    offset = mask.shape[3] - mask.shape[2]
    added = (mask.masked_fill(~seen, 0.0),) if adds else ()
    return Causal(offset, edited=seen, blind_mixes_all=mixes_all), added


def _masked_softmax(
    self: Any, attn_scores: torch.Tensor, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """`AttentionBridge._masked_softmax`, that asks no promised scores which are masked."""

    def apply(values: torch.Tensor) -> torch.Tensor:
        pattern: torch.Tensor = original(AttentionBridge, "_masked_softmax")(self, values, dtype)
        return pattern

    if is_promise(attn_scores):
        return soften(attn_scores, apply, dtype)
    return apply(promises.build(attn_scores))


def _process_output(self: Any, output: Any) -> Any:
    """`JointQKVAttentionBridge._process_output`, which keeps no promised pattern."""
    if isinstance(output, tuple) and any(map(is_promise, output)):
        self._pattern = None
        output = _without_pattern(output)
    return original(JointQKVAttentionBridge, "_process_output")(self, output)


def forward_of_block(self: Any, *args: Any, **kwargs: Any) -> Any:
    """`PositionEmbeddingsAttentionBridge.forward`, which gives no promised pattern either."""
    output = original(PositionEmbeddingsAttentionBridge, "forward")(self, *args, **kwargs)
    return _without_pattern(output) if isinstance(output, tuple) else output


def _without_pattern(output: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a block's attention gives; None for a pattern without values, as transformers' SDPA."""
    return tuple(None if is_promise(each) else each for each in output)

"""transformers' attention with SDPA, which builds no scores and no pattern; and its masks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from transformer_lens.model_bridge.generalized_components import (
    JointQKVAttentionBridge,
    JointQKVPositionEmbeddingsAttentionBridge,
    PositionEmbeddingsAttentionBridge,
)
from transformers import masking_utils

from tl_devicefix.fusing.fused import class_of
from tl_devicefix.fusing.one_forward import FACTS, forward_cache
from tl_devicefix.monkeypatch.patch import patches

_Result = TypeVar("_Result")


class ThisForward(NamedTuple):
    """Facts about the forward in which a block runs; other hosts get them, too.

    The defaults are for a forward that is not a Bridge's.
    """

    is_of_bridge: bool = False
    """True in a Bridge's forward whose masks are [batch, pos]: layers may run without wrappers."""
    by_sdpa: bool = False
    """True if blocks take masks for SDPA, False if masks are for eager attention."""
    is_cache_read: bool = True
    """True if `generate` or the user reads the KV cache afterwards."""


CONFIG_OF_SDPA = "config of SDPA"
"""The key in `forward_cache` for the config whose masks transformers makes for SDPA."""


def this_forward() -> ThisForward:
    """Return the facts about this thread's forward."""
    return forward_cache().get(FACTS) or ThisForward()


def _looks_up(attention: nn.Module) -> bool:
    """Return True if transformers' attention gets its implementation from the config."""
    code = getattr(inspect.unwrap(type(attention).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def why_not_eager(attention: nn.Module) -> str | None:
    """Return why transformers' attention differs from the Bridge's; None if it does not."""
    how = getattr(getattr(attention, "config", None), "_attn_implementation", None) or "eager"
    if how == "eager" or not _looks_up(attention):
        return None
    return f"its transformers config asks for {how!r}, but the Bridge's attention is eager"


def why_own_mask(attention: nn.Module) -> str | None:
    """Return why attention applies another mask than a Bridge's; None if it does not.

    Such attention has its own causal mask in a buffer. A Bridge only uses the mask it is given.
    """
    triangle = getattr(attention, "_buffers", {}).get("bias")
    if _looks_up(attention) or triangle is None or triangle.dim() != 4:
        return None
    return f"a {type(attention).__name__} has a mask of its own"


def why_no_sdpa(attention: nn.Module) -> str | None:
    """Return why transformers' attention cannot use SDPA; None if it can."""
    if not _looks_up(attention):
        return f"a {type(attention).__name__} computes in its own way"
    if any(getattr(attention, name, None) is not None for name in _SOFT_CAPS):
        return "its scores have a soft cap"
    if getattr(attention, "sinks", None) is not None:
        return "it has attention sinks"
    if getattr(attention, "reorder_and_upcast_attn", False):
        return "its scores are computed in float32"
    if getattr(attention, "is_causal", None) is not True:
        return "it is not causal"
    return None


_SOFT_CAPS = ("attn_logit_softcapping", "softcap", "logits_soft_cap")


def reads_masks_of_sdpa(wrapper: nn.Module) -> bool:
    """Return True if TransformerLens's own attention can read masks for SDPA.

    Such a mask is boolean, or None for causal attention.
    """
    return class_of(wrapper) in (
        JointQKVAttentionBridge,
        JointQKVPositionEmbeddingsAttentionBridge,
        PositionEmbeddingsAttentionBridge,
    )


@patches(
    "AttentionMaskInterface",
    takes="self key",
    why="in a Bridge's forward with SDPA, transformers makes masks for SDPA",
    since="4.0",
)
def __getitem__(original: Callable[..., Any], self: object, key: str) -> Any:
    makes = original(self, key)
    # Outside such a forward, or if the user replaced the function, nothing changes.
    if CONFIG_OF_SDPA not in forward_cache() or makes is not masking_utils.eager_mask:
        return makes
    return _mask_for_sdpa


def _mask_for_sdpa(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """Make an SDPA mask for the Bridge that is running, and eager ones for other models."""
    is_of_bridge = kwargs.get("config") is forward_cache()[CONFIG_OF_SDPA]
    makes = masking_utils.sdpa_mask if is_of_bridge else masking_utils.eager_mask
    return makes(*args, **kwargs)


_patches_kv_cache = functools.partial(
    patches, why="the KV cache, by its name in transformers 5.24", since="3.9"
)


@_patches_kv_cache("AttentionBridge", "_update_kv_cache", takes="self k v")
@_patches_kv_cache("MLAAttentionBridge", "forward", takes="self")
@_patches_kv_cache("GlmMoeDsaAttentionBridge", "forward", takes="self")
def with_kv_cache(
    original: Callable[..., _Result], self: nn.Module, *args: object, **kwargs: object
) -> _Result:
    """Rename `cache` to `past_key_values`, the name that the Bridge's attention reads."""
    # Rename it only if the cache is read: cached keys have another memory layout, so scores differ
    # in the last bit from TransformerLens's, which caches none.
    if "cache" in kwargs and this_forward().is_cache_read:
        kwargs["past_key_values"] = kwargs.pop("cache")
    return original(self, *args, **kwargs)


@_patches_kv_cache("GatedDeltaNetBridge", "forward", takes="self")
def with_state(
    original: Callable[..., _Result], self: Any, *args: object, **kwargs: object
) -> _Result:
    """Run transformers' layer, which reads the cache; the Bridge's own forward has none."""
    if kwargs.get("cache") is not None and this_forward().is_cache_read:
        return self._native_forward(*args, **kwargs)
    return original(self, *args, **kwargs)

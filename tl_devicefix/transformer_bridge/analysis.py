"""TransformerLens's analysis tools that compute with what several blocks cached."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from transformer_lens.tools.analysis.attribution_patching import (
    cache_activation_and_gradient as transformer_lens_gradients,
)

try:
    from transformer_lens.patching import (  # type: ignore[attr-defined]
        get_act_patch_direct_path as transformer_lens_direct_path,
    )
except ImportError:  # TransformerLens 3.9
    from transformer_lens.tools.analysis.direct_path_patching import (
        get_act_patch_direct_path as transformer_lens_direct_path,
    )

from tl_devicefix.dispatch.carrying import move
from tl_devicefix.gathering.cache_at_home import CacheAtHome


def get_act_patch_direct_path(
    model: Any,
    corrupted_tokens: torch.Tensor,
    clean_cache: Any,
    corrupted_cache: Any,
    patching_metric: Any,
    src_layer: int,
    src_head: int,
    component: Any = "q",
    verbose: bool = True,
) -> torch.Tensor:
    """See TransformerLens's. What a head has written is computed on the head's own device."""
    placement = getattr(model, "placement", None)
    if placement is not None and len(placement.memories) > 1:
        clean_cache = _with_source_in_place(clean_cache, model, src_layer)
        corrupted_cache = _with_source_in_place(corrupted_cache, model, src_layer)
    return transformer_lens_direct_path(
        model,
        corrupted_tokens,
        clean_cache,
        corrupted_cache,
        patching_metric,
        src_layer,
        src_head,
        component,
        verbose,
    )


def _with_source_in_place(cache: Any, model: Any, layer: int) -> Mapping[str, torch.Tensor]:
    """A cache's activations where they are stored, with a layer's heads where its weights are."""
    stored = getattr(cache, "cache_dict", cache)
    if isinstance(stored, CacheAtHome):
        stored = stored.stored()
    name = f"blocks.{layer}.attn.hook_z"
    return {**stored, name: move(stored[name], model.blocks[layer].attn.W_O.device)}


def cache_activation_and_gradient(
    model: Any,
    tokens: torch.Tensor,
    metric_fn: Any,
    names_filter: Any = None,
    **kwargs: Any,
) -> Any:
    """See TransformerLens's. Activations and gradients are read at home, as cached ones are."""
    cache: Any = transformer_lens_gradients(model, tokens, metric_fn, names_filter, **kwargs)
    placement = getattr(model, "placement", None)
    if placement is None or len(placement.devices) == 1:
        return cache
    at_home = CacheAtHome(placement.home)
    return dataclasses.replace(
        cache, activations=at_home.of(cache.activations), gradients=at_home.of(cache.gradients)
    )

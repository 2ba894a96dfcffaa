"""A block's part of a KV cache, as it is sent: class, settings and tensors.

The worker keeps the part, and at home its tensors are `RemoteTensor`s of a number. Each run that
appends gets a new number: whoever has kept the tensors of before has them still.
"""

from __future__ import annotations

from typing import Any

import torch
import transformer_lens
from transformers import cache_utils

ENTRY, CACHE = "\0entry", "\0cache"
"""What stands in the place of an entry of TransformerLens's, or of transformers' cache."""
_PLAIN = (bool, int, float, str)


def layer_of_cache(cache: Any, index: int) -> Any:
    """A layer's part of a cache of transformers'; None if it is none that grows by itself."""
    if type(cache) is not cache_utils.DynamicCache or index > len(cache.layers):
        return None
    if index == len(cache.layers):
        if not cache.layer_class_to_replicate:
            return None
        cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[index]
    kinds = cache_utils.DynamicLayer, cache_utils.DynamicSlidingWindowLayer
    return layer if type(layer) in kinds else None


def state_of(entry: Any) -> tuple[str, dict[str, Any], dict[str, torch.Tensor]]:
    """Its class, and what it has: settings, and tensors."""
    has = vars(entry)
    settings = {name: value for name, value in has.items() if isinstance(value, _PLAIN)}
    tensors = {name: value for name, value in has.items() if isinstance(value, torch.Tensor)}
    return type(entry).__name__, settings, tensors


def made_of(
    kind: str, settings: dict[str, Any], tensors: dict[str, torch.Tensor], device: torch.device
) -> Any:
    """The entry that has this."""
    cls = getattr(transformer_lens, kind, None) or getattr(cache_utils, kind)
    entry = object.__new__(cls)
    vars(entry).update({"keys": None, "values": None} if "is_initialized" in settings else {})
    vars(entry).update(settings)
    for name, tensor in tensors.items():
        setattr(entry, name, tensor.to(device))
        if "is_initialized" in settings:
            entry.dtype, entry.device = tensor.dtype, device
    return entry


def as_argument(mark: str, entry: Any, index: int) -> Any:
    """What a block takes for it: the entry, or a cache that has this layer's part alone."""
    if mark == ENTRY:
        return entry
    cache = cache_utils.DynamicCache()
    cache.layers = [None] * index + [entry]  # type: ignore[list-item]
    return cache

"""A block's part of a KV cache, an *entry*: its tensors stay with the worker until home reads them.

1. Home sends an `EntryState` with keys and values; for those that only the worker has, with names.
2. The worker builds an entry from it, and the block appends to that entry.
3. The worker keeps the new tensors under a new number; home's entry gets `RemoteTensor`s for them.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from transformers import cache_utils

CacheEntry: TypeAlias = Any
"""A TransformerLensKeyValueCacheEntry, or a layer of transformers' cache."""

_GROWING = cache_utils.DynamicLayer, cache_utils.DynamicSlidingWindowLayer
_SENT_TYPES = (torch.Tensor, type(None), bool, int, float, str, torch.dtype, torch.device)


def layer_of_cache(cache: cache_utils.Cache, index: int) -> CacheEntry | None:
    """Return a layer's entry of transformers' cache; None if the entry cannot be sent.

    Only entries that grow by appending can be sent: a linear attention's state cannot.
    """
    # Require the exact class: subclasses store keys and values elsewhere, or quantised.
    if type(cache) is not cache_utils.DynamicCache or index > len(cache.layers):
        return None
    if index == len(cache.layers):  # transformers adds a layer on first use
        if not cache.layer_class_to_replicate:
            return None
        cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[index]
    return layer if type(layer) in _GROWING else None


def attributes_of(entry: CacheEntry) -> dict[str, object]:
    """Return an entry's keys and values, and its plain attributes, such as `frozen`."""
    return {name: value for name, value in vars(entry).items() if isinstance(value, _SENT_TYPES)}


def set_attributes(entry: CacheEntry, attributes: dict[str, object], device: torch.device) -> None:
    """Set an entry's attributes, replacing the sender's devices with `device`."""
    for name, value in attributes.items():
        setattr(entry, name, device if isinstance(value, torch.device) else value)


def as_cache(entry: CacheEntry, index: int) -> cache_utils.Cache:
    """Return a transformers cache that holds one layer's entry."""
    cache = cache_utils.DynamicCache()
    # Earlier layers are None: a layer reads its own entry only, by its index.
    cache.layers = [None] * index + [entry]  # type: ignore[assignment]  # typed without None
    return cache

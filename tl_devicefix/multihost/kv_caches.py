"""A block's part of a KV cache, an *entry*: its tensors stay with the worker until home reads them.

Home sends an `EntryState`: keys and values, or the names of those that the worker keeps and that
nobody has read. The worker makes an entry of it, and the block appends to that. The tensors are
then kept under a new number, and home's entry gets `RemoteTensor`s of that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch
from transformers import cache_utils

if TYPE_CHECKING:
    from transformer_lens.cache.key_value_cache_entry import TransformerLensKeyValueCacheEntry
    from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

_Layer: TypeAlias = "CacheLayerMixin | LinearAttentionCacheLayerMixin | cache_utils.DummyLayer"
CacheEntry: TypeAlias = "TransformerLensKeyValueCacheEntry | _Layer"

_LAYERS = "DynamicLayer", "DynamicSlidingWindowLayer"
# Look them up by name: older versions of transformers lack them.
_GROWING = tuple(getattr(cache_utils, name) for name in _LAYERS if hasattr(cache_utils, name))
_SENT_IN_CACHES = (torch.Tensor, type(None), bool, int, float, str, torch.dtype, torch.device)


def layer_of_cache(cache: cache_utils.Cache, index: int) -> CacheEntry | None:
    """Return a layer's entry of transformers' cache; None if it does not grow by appending."""
    # The exact class: subclasses store keys and values elsewhere, or quantised.
    if type(cache) is not cache_utils.DynamicCache or index > len(cache.layers):
        return None
    if index == len(cache.layers):  # transformers makes a layer when it is first used
        if not cache.layer_class_to_replicate:
            return None
        cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[index]
    return layer if type(layer) in _GROWING else None


def attributes_of(entry: CacheEntry) -> dict[str, object]:
    """Return an entry's keys and values, and its plain attributes, such as `frozen`."""
    return {
        name: value for name, value in vars(entry).items() if isinstance(value, _SENT_IN_CACHES)
    }


def set_attributes(entry: CacheEntry, attributes: dict[str, object], device: torch.device) -> None:
    """Set an entry's attributes, with `device` in the place of the other side's."""
    is_device = {name: isinstance(value, torch.device) for name, value in attributes.items()}
    vars(entry).update({k: device if is_device[k] else v for k, v in attributes.items()})


def as_argument(entry: CacheEntry, index: int) -> cache_utils.Cache:
    """Return a cache of transformers' that has one layer's entry alone."""
    cache = cache_utils.DynamicCache()
    # None for the layers before: a layer reads its own entry only, by its index.
    cache.layers = [None] * index + [entry]  # type: ignore[assignment]  # it has no type for None
    return cache

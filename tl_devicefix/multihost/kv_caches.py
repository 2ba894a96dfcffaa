"""A block's part of a KV cache, an entry: it stays with the worker until home reads it.

1. Home sends an entry's class, settings and tensors. If nobody has read the tensors of an earlier
   reply, it sends the number under which the worker keeps them.
2. The worker makes the entry, or copies the one that it keeps, and the block appends to it.
3. The worker keeps it under a new number, because somebody may still hold the tensors of before.
4. At home, the entry's tensors become `RemoteTensor`s of the new number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, TypedDict

import torch
import transformer_lens
from transformers import cache_utils

if TYPE_CHECKING:
    from transformer_lens.cache.key_value_cache_entry import TransformerLensKeyValueCacheEntry
    from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

_Layer: TypeAlias = "CacheLayerMixin | LinearAttentionCacheLayerMixin | cache_utils.DummyLayer"
Entry: TypeAlias = "TransformerLensKeyValueCacheEntry | _Layer"

ENTRY, CACHE = "\0entry", "\0cache"
"""Marks in a block's arguments for an entry of TransformerLens's, and for transformers' cache."""
_LAYERS = "DynamicLayer", "DynamicSlidingWindowLayer"
# By name, because older versions of transformers lack these classes.
_GROWING = tuple(getattr(cache_utils, name) for name in _LAYERS if hasattr(cache_utils, name))
_SETTINGS = (bool, int, float, str)
"""Types of an entry's settings, such as `frozen` and `is_initialized`."""


class EntryState(TypedDict):
    """An entry, as home sends it.

    `kind` is its class's name, `settings` its plain attributes; `tensors` is a number if the worker
    keeps them. `new` is the number for the entry once it has grown.
    """

    kind: str
    settings: dict[str, object]
    tensors: dict[str, torch.Tensor] | int
    new: int


def layer_of_cache(cache: cache_utils.Cache, index: int) -> Entry | None:
    """Return a layer's entry of transformers' cache; None if it does not grow by appending."""
    # The exact class, because subclasses store keys and values elsewhere, or quantised.
    if type(cache) is not cache_utils.DynamicCache or index > len(cache.layers):
        return None
    if index == len(cache.layers):  # transformers makes a layer when it is first used
        if not cache.layer_class_to_replicate:
            return None
        cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[index]
    return layer if type(layer) in _GROWING else None


def settings_of(entry: Entry) -> dict[str, object]:
    """Return the plain attributes of an entry."""
    return {k: value for k, value in vars(entry).items() if isinstance(value, _SETTINGS)}


def tensors_of(entry: Entry) -> dict[str, torch.Tensor]:
    """Return the keys and values of an entry, by their names there."""
    return {k: value for k, value in vars(entry).items() if isinstance(value, torch.Tensor)}


def set_tensors(entry: Entry, tensors: dict[str, torch.Tensor]) -> None:
    """Put keys and values into an entry; one of transformers also notes dtype and device."""
    vars(entry).update(tensors)
    if type(entry) in _GROWING:
        for tensor in tensors.values():
            vars(entry).update(dtype=tensor.dtype, device=tensor.device)


def made_of(
    kind: str, settings: dict[str, object], tensors: dict[str, torch.Tensor], device: torch.device
) -> Entry:
    """Return the entry that home has, on a device of the worker."""
    # Without `__init__`, whose arguments differ between classes and versions.
    cls = getattr(transformer_lens, kind, None) or getattr(cache_utils, kind)
    entry: Entry = object.__new__(cls)
    if cls in _GROWING:
        vars(entry).update(keys=None, values=None)
    vars(entry).update(settings)
    set_tensors(entry, {name: tensor.to(device) for name, tensor in tensors.items()})
    return entry


def as_argument(mark: str, entry: Entry, index: int) -> Entry | cache_utils.Cache:
    """Return what stands for a mark: the entry, or a cache that has this layer's entry alone."""
    if mark == ENTRY:
        return entry
    cache = cache_utils.DynamicCache()
    # None for the layers before, because a layer reads its own entry only, by its index.
    cache.layers = [None] * index + [entry]  # type: ignore[assignment]  # it has no type for None
    return cache

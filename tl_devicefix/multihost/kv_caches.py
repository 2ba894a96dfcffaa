"""A block's part of a KV cache, an entry: it stays with the worker, and home reads it when asked.

1. Home sends an entry's class, settings and tensors. If nobody has read the tensors of an earlier
   reply, it sends the number under which the worker keeps them.
2. The worker makes the entry, or copies the one that it keeps, and the block appends to it.
3. The worker keeps it under a new number, because somebody may still hold the tensors of before.
4. At home, the entry's tensors become `RemoteTensor`s of the new number.
"""

from __future__ import annotations

from typing import Any, TypedDict, TypeGuard

import torch
import transformer_lens
from transformers import cache_utils

ENTRY, CACHE = "\0entry", "\0cache"
"""Marks in a block's arguments for an entry of TransformerLens's, and for transformers' cache."""
_LAYERS = "DynamicLayer", "DynamicSlidingWindowLayer"
_GROWING = tuple(getattr(cache_utils, name) for name in _LAYERS if hasattr(cache_utils, name))
Setting = bool | int | float | str


class EntryState(TypedDict):
    """An entry, as home sends it.

    `kind` is its class's name, `settings` its plain attributes; `tensors` is a number if the worker
    keeps them. `new` is the number for the entry once it has grown.
    """

    kind: str
    settings: dict[str, Setting]
    tensors: dict[str, torch.Tensor] | int
    new: int


def is_cache(value: object) -> TypeGuard[cache_utils.Cache]:
    """Return True for transformers' KV caches."""
    return isinstance(value, cache_utils.Cache)


def layer_of_cache(cache: cache_utils.Cache, index: int) -> object:
    """Return a layer's entry of transformers' cache; None if it does not grow by appending."""
    if type(cache) is not cache_utils.DynamicCache or index > len(cache.layers):
        return None
    if index == len(cache.layers):  # transformers makes a layer when it is first used
        if not cache.layer_class_to_replicate:
            return None
        cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[index]
    # By its very class, because a subclass may append otherwise.
    return layer if type(layer) in _GROWING else None


def settings_of(entry: object) -> dict[str, Setting]:
    """Return the plain attributes of an entry."""
    return {k: value for k, value in vars(entry).items() if isinstance(value, Setting)}


def tensors_of(entry: object) -> dict[str, torch.Tensor]:
    """Return the keys and values of an entry, by their names there."""
    return {k: value for k, value in vars(entry).items() if isinstance(value, torch.Tensor)}


def set_tensors(entry: object, tensors: dict[str, torch.Tensor]) -> None:
    """Put keys and values into an entry."""
    vars(entry).update(tensors)
    if type(entry) in _GROWING:  # transformers' note these when they get their first tensors
        for tensor in tensors.values():
            vars(entry).update(dtype=tensor.dtype, device=tensor.device)


def made_of(
    kind: str, settings: dict[str, Setting], tensors: dict[str, torch.Tensor], device: torch.device
) -> object:
    """Return the entry that home has, on a device of the worker."""
    cls = getattr(transformer_lens, kind, None) or getattr(cache_utils, kind)
    entry = object.__new__(cls)  # because each class's `__init__` takes others
    if cls in _GROWING:  # an empty one has these attributes, and no tensors
        entry.keys, entry.values = None, None
    vars(entry).update(settings)
    set_tensors(entry, {name: tensor.to(device) for name, tensor in tensors.items()})
    return entry


def as_argument(mark: str, entry: Any, index: int) -> object:
    """Return what stands for a mark: the entry, or a cache that has this layer's entry alone."""
    if mark == ENTRY:
        return entry
    cache = cache_utils.DynamicCache()
    # None for other layers, because this block reads its own alone.
    cache.layers = [None] * index + [entry]
    return cache

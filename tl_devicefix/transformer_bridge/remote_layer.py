"""A layer of transformers' that another host runs by one command.

Its part of transformers' cache goes with it, and comes back longer: all that a layer knows of a
cache's other parts is made before the blocks, as masks and positions.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from tl_devicefix.attention.kv_cache import CacheOfBlock
from tl_devicefix.placement.in_use import other_hosts


class RemoteLayer:
    """A layer, and how it takes its arguments.

    Attributes:
        snapshot: of the layer, of whoever runs it elsewhere.
    """

    snapshot: Any = None

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self._names = list(inspect.signature(layer.forward).parameters)
        indices = {getattr(module, "layer_idx", None) for module in layer.modules()} - {None}
        self._index = indices.pop() if len(indices) == 1 else None
        self._checkpointing = [
            module for module in layer.modules() if hasattr(module, "gradient_checkpointing")
        ]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it: by one command, or else operation by operation."""
        hosts = other_hosts()
        run = None if hosts is None else hosts.run_block
        output = None if run is None else self._run(run, args, kwargs)
        return self._layer(*args, **kwargs) if output is None else output

    def _run(
        self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor | None:
        inputs = dict(zip(self._names, args)) | kwargs
        if inputs.get("output_router_logits"):  # transformers records them by hooks in the layer
            return None
        if any(module.training and module.gradient_checkpointing for module in self._checkpointing):
            return None
        cache_name = next((n for n, value in inputs.items() if type(value) is DynamicCache), None)
        if cache_name is None:
            return run(self._layer, inputs, None, self)  # type: ignore[no-any-return]
        past = inputs.pop(cache_name)
        index = self._index
        entry = None if index is None else _entry(past, index)
        if index is None or entry is None:
            return None
        classes, names = (type(entry), DynamicCache), ("keys", "values")
        as_cache = functools.partial(cache_with, index)
        cache = CacheOfBlock(cache_name, entry, classes, names, "update", 2, as_cache)
        output = run(self._layer, inputs, cache, self)
        if output is not None and index == len(past.layers):
            past.layers.append(entry)
        return output  # type: ignore[no-any-return]


_OF_EVERY_CACHE = vars(DynamicCache()).keys()


def _entry(past: Any, index: int) -> Any:
    """A layer's part of a cache; None if it is none that grows by keys and values alone."""
    has_more = vars(past).keys() - _OF_EVERY_CACHE  # as a method of its own
    if has_more or past.offloading or index > len(past.layers):
        return None
    if index < len(past.layers):
        entry = past.layers[index]
    else:
        entry = past.layer_class_to_replicate and past.layer_class_to_replicate()
    return entry if type(entry) in (DynamicLayer, DynamicSlidingWindowLayer) else None


def cache_with(index: int, entry: Any) -> DynamicCache:
    """A cache of which there is one layer's part: asked for another, it fails."""
    cache = DynamicCache()
    cache.layers = [None] * index + [entry]  # type: ignore[list-item]
    return cache

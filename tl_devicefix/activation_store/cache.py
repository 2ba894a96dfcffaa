"""A cache of activations that are read from disk each time that they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from transformer_lens import ActivationCache

from tl_devicefix.activation_store.shards import Stored
from tl_devicefix.gathering.caches import CacheAtHome
from tl_devicefix.misspelt import did_you_mean
from tl_devicefix.placement.devices import HOST


class NotRead(NamedTuple):
    """Stands for a tensor on disk."""

    read: Callable[[], torch.Tensor]


class CacheOnDisk(CacheAtHome):
    """A dict in which a `NotRead` is read each time that it is asked for.

    Changes in place to a tensor that was read stay in that tensor, as in one that was brought home;
    `cache_dict[name] = tensor` keeps it.
    """

    def __missing__(self, name: str) -> Any:
        raise KeyError(f"{name} was not saved{did_you_mean(name, self)}")

    def _where_it_lies(self, value: Any) -> Any:
        return value.read() if isinstance(value, NotRead) else value

    def copy(self) -> CacheAtHome:
        """A shallow copy, which has read nothing yet."""
        return self.of({name: dict.__getitem__(self, name) for name in self})


def cache_of(
    stored: Mapping[str, Stored], examples: int | slice | list[int], model: Any
) -> ActivationCache:
    """An ActivationCache of activations on disk, none of which is read yet.

    Args:
        stored: by name.
        examples: an example's number, for a cache without a batch axis, or several.
        model: at whose home they are read; None for the CPU.
    """
    placement = getattr(model, "placement", None)
    if placement is not None:
        home = placement.home
    else:
        home = HOST if model is None else next(model.parameters()).device
    cache = CacheOnDisk(home)
    for name, activation in stored.items():
        not_read: Any = NotRead(partial(activation.__getitem__, examples))
        cache[name] = not_read
    return ActivationCache(cache, model, has_batch_dim=not isinstance(examples, int))

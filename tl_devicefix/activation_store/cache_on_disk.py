"""A cache of activations that are read from a harvest when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from transformer_lens import ActivationCache

from tl_devicefix.activation_store.stored import Stored
from tl_devicefix.gathering.caches import CacheAtHome
from tl_devicefix.misspelt import did_you_mean
from tl_devicefix.placement.devices import HOST


class NotRead(NamedTuple):
    """What stands for a tensor on disk."""

    read: Callable[[], torch.Tensor]


class CacheOnDisk(CacheAtHome):
    """A dict in which a `NotRead` is read each time that it is asked for.

    What is changed in place in a tensor that was read is changed in that tensor only, as in one
    that was brought home; `cache_dict[name] = tensor` keeps it.

    Args:
        home: the device where tensors are read.
    """

    def __missing__(self, name: str) -> Any:
        raise KeyError(f"{name} was not harvested{did_you_mean(name, self)}")

    def _where_it_lies(self, value: Any) -> Any:
        return value.read() if isinstance(value, NotRead) else value

    def of(self, activations: Any) -> CacheAtHome:
        """A cache of other activations, wherever they are, that is read where this one is."""
        new = CacheOnDisk(self._home)
        new.update(activations)
        return new

    def copy(self) -> CacheAtHome:
        """A shallow copy, of which nothing has been read."""
        return self.of({name: dict.__getitem__(self, name) for name in self})


def cache_of(
    stored: Mapping[str, Stored], which: int | slice | list[int], model: Any
) -> ActivationCache:
    """An ActivationCache of what is stored, of which nothing is read yet.

    Args:
        stored: by name.
        which: an example's number, for a cache without a batch axis, or several.
        model: at whose home it is read; None for the CPU.
    """
    cache = CacheOnDisk(_home(model))
    for name, each in stored.items():
        cache[name] = _not_read(each, which)  # type: ignore[assignment]
    return ActivationCache(cache, model, has_batch_dim=not isinstance(which, int))


def _home(model: Any) -> torch.device:
    placement = getattr(model, "placement", None)
    if placement is not None:
        return placement.home
    return HOST if model is None else next(model.parameters()).device


def _not_read(stored: Stored, which: int | slice | list[int]) -> NotRead:
    if stored.entry.axis == "shared":
        return NotRead(lambda: stored.of_shard(0))
    return NotRead(lambda: stored[which])

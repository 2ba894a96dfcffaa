"""Cached activations: stored where they were computed, handed out at home."""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, ItemsView, Iterator, ValuesView
from typing import Any

import torch

from tl_devicefix.alignment import move
from tl_devicefix.patches import original
from tl_devicefix.placement import Placement


class CacheAtHome(dict[str, torch.Tensor]):
    """A cache of activations that stores each tensor where it was computed and reads it at home.

    Args:
        home: the device that every read brings the tensor to.
    """

    def __init__(self, home: torch.device) -> None:
        super().__init__()
        self.home = home

    def __getitem__(self, name: str) -> torch.Tensor:
        return move(super().__getitem__(name), self.home)

    def __iter__(self) -> Iterator[str]:
        # Python copies a dict's values as they lie (dict(cache), {**cache}) unless it has this.
        return super().__iter__()

    def __or__(self, other: Any) -> Any:
        return dict(self) | other

    def setdefault(self, name: str, default: Any = None) -> Any:
        """As `dict.setdefault`, at home."""
        return move(super().setdefault(name, default), self.home)

    def popitem(self) -> tuple[str, torch.Tensor]:
        """As `dict.popitem`, at home."""
        name, value = super().popitem()
        return name, move(value, self.home)

    def get(self, name: str, default: Any = None) -> Any:
        """As `dict.get`, at home."""
        return move(super().get(name, default), self.home)

    def pop(self, name: str, *default: Any) -> Any:
        """As `dict.pop`, at home."""
        return move(super().pop(name, *default), self.home)

    def values(self) -> ValuesAtHome:  # type: ignore[override]
        """As `dict.values`; each tensor comes home when it is reached."""
        return ValuesAtHome(self)

    def items(self) -> ItemsAtHome:  # type: ignore[override]
        """As `dict.items`; each tensor comes home when it is reached."""
        return ItemsAtHome(self)

    def copy(self) -> CacheAtHome:
        """A shallow copy that reads at home too."""
        return self._with(lambda value: value)

    def __copy__(self) -> CacheAtHome:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> CacheAtHome:
        return self._with(lambda value: copy.deepcopy(value, memo))

    def _with(self, change: Callable[[torch.Tensor], torch.Tensor]) -> CacheAtHome:
        """A cache of changed tensors, each where this one has it."""
        new = CacheAtHome(self.home)
        for name in self:
            new[name] = change(super().__getitem__(name))
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Saved as a plain dict, at home, so that torch.load can load it with weights_only.
        return OrderedDict, (), None, None, iter(self.items())


class ValuesAtHome(ValuesView[torch.Tensor]):
    """The values of a `CacheAtHome`; one tensor at a time is at home."""

    _mapping: CacheAtHome

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self._mapping[name] for name in self._mapping)


class ItemsAtHome(ItemsView[str, torch.Tensor]):
    """The items of a `CacheAtHome`; one tensor at a time is at home."""

    _mapping: CacheAtHome

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, self._mapping[name]) for name in self._mapping)


def get_caching_hooks(self: Any, *args: Any, **kwargs: Any) -> Any:
    """`HookedTransformer.get_caching_hooks`, with a cache that is read at home."""
    return _with_cache_at_home(self, "get_caching_hooks", args, kwargs)


def add_caching_hooks(self: Any, *args: Any, **kwargs: Any) -> Any:
    """`HookedTransformer.add_caching_hooks`, with a cache that is read at home."""
    return _with_cache_at_home(self, "add_caching_hooks", args, kwargs)


def _with_cache_at_home(
    model: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a method that makes a cache, and have it make one that is read at home.

    A model on one device, a cache that the caller brings, and a `device` that the caller names
    (activations then stay there) are left as they are.
    """
    unpatched = original(type(model), method)
    placement: Placement | None = getattr(model, "placement", None)
    if placement is None or len(placement.devices) == 1:
        return unpatched(model, *args, **kwargs)
    given = inspect.signature(unpatched).bind(model, *args, **kwargs)
    if given.arguments.get("cache") is None and given.arguments.get("device") is None:
        given.arguments["cache"] = CacheAtHome(placement.home)
    return unpatched(*given.args, **given.kwargs)

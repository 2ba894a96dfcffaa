"""Cached activations: stored where they were computed, handed out at home.

"Home" is the device of `gather_on` where that is in force.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, ItemsView, Iterator, Mapping, ValuesView
from typing import Any

import torch
from transformer_lens import ActivationCache

from tl_devicefix.carrying import move
from tl_devicefix.gathering import ReadOn, ReadWhereRun
from tl_devicefix.gathering_device import chosen_device, gather_nowhere, gather_on
from tl_devicefix.patches import original
from tl_devicefix.placement import Placement


class CacheAtHome(dict[str, torch.Tensor]):
    """A cache of activations that stores each tensor where it was computed and reads it at home.

    Args:
        home: the device that every read brings the tensor to.
    """

    def __init__(self, home: torch.device) -> None:
        super().__init__()
        self._home = home

    @property
    def home(self) -> torch.device:
        """The device that every read brings the tensor to."""
        return chosen_device() or self._home

    def __getitem__(self, name: str) -> torch.Tensor:
        return move(super().__getitem__(name), self.home)

    def stored(self) -> dict[str, torch.Tensor]:
        """The tensors where they were computed, as a plain dict."""
        return {name: super(CacheAtHome, self).__getitem__(name) for name in self}

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
        return self.of({name: change(value) for name, value in self.stored().items()})

    def of(self, activations: Mapping[str, torch.Tensor]) -> CacheAtHome:
        """A cache of other activations, wherever they are, that is read where this one is."""
        new = CacheAtHome(self._home)
        new.update(activations)
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


@functools.cache
def read_where_chosen(name: str) -> Callable[..., Any]:
    """`ActivationCache.__getitem__` and its like, also of a plain dict within `gather_on`."""

    def method(self: Any, *args: Any) -> Any:
        chosen = chosen_device()
        view = self if chosen is None else _read_at(self, chosen)
        return original(ActivationCache, name)(view, *args)

    return method


@functools.cache
def reading_together(name: str) -> Callable[..., Any]:
    """A method of ActivationCache that reads activations and weights of several blocks together.

    They come to the device on which the cache is read: home, or that of `gather_on`, or where
    `cache.to(...)` brought it. The model stays where it is.
    """

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        there, device = original(ActivationCache, name), _read_on(self)
        if device is None:
            return there(self, *args, **kwargs)
        view = _read_at(self, device)
        view.model = ReadOn(_model_of(self), device)
        with gather_on(device):
            result = there(
                view,
                *(move(each, device) for each in args),
                **{key: move(each, device) for key, each in kwargs.items()},
            )
        if view.cache_dict is not self.cache_dict:
            _keep_head_results(view.cache_dict, self.cache_dict)
        return result

    return method


def _keep_head_results(read: CacheAtHome, cache_dict: dict[str, torch.Tensor]) -> None:
    """Add what a method has computed for later, where the rest of the plain dict is."""
    for name in read:
        if name not in cache_dict:
            cache_dict[name] = read[name]


def compute_head_results(self: Any) -> None:
    """`ActivationCache.compute_head_results`, each block's on the block's own device.

    The results are larger than what they are computed from, and so stay there until they are read.
    """
    placement = getattr(_model_of(self), "placement", None)
    if not isinstance(self.cache_dict, CacheAtHome) or placement is None:
        reading_together("compute_head_results")(self)
        return
    in_place = _in_place(self)
    in_place.model = ReadWhereRun(_model_of(self))
    for name, value in in_place.cache_dict.items():
        if name.endswith("attn.hook_z"):  # someone may have put it elsewhere
            in_place.cache_dict[name] = move(value, placement.device_of(name))
    with gather_nowhere():
        original(ActivationCache, "compute_head_results")(in_place)
    self.cache_dict.update(in_place.cache_dict)


def remove_batch_dim(self: Any) -> Any:
    """`ActivationCache.remove_batch_dim`, which leaves each activation where it is."""
    there = original(ActivationCache, "remove_batch_dim")
    if not isinstance(self.cache_dict, CacheAtHome):
        return there(self)
    in_place = _in_place(self)
    there(in_place)
    self.cache_dict.update(in_place.cache_dict)
    self.has_batch_dim = in_place.has_batch_dim
    return self


def apply_slice_to_batch_dim(self: Any, batch_slice: Any) -> Any:
    """`ActivationCache.apply_slice_to_batch_dim`, which leaves each activation where it is."""
    there = original(ActivationCache, "apply_slice_to_batch_dim")
    if not isinstance(self.cache_dict, CacheAtHome):
        return there(self, batch_slice)
    sliced = there(_in_place(self), batch_slice)
    sliced.cache_dict = self.cache_dict.of(sliced.cache_dict)
    return sliced


def to(self: Any, *args: Any, **kwargs: Any) -> Any:
    """`ActivationCache.to`: each activation goes there from where it is, not by way of home."""
    there = original(ActivationCache, "to")
    if not isinstance(self.cache_dict, CacheAtHome):
        return there(self, *args, **kwargs)
    self.cache_dict = there(_in_place(self), *args, **kwargs).cache_dict
    return self


def _in_place(cache: Any) -> Any:
    """The same cache, with each activation read where it was computed."""
    view = copy.copy(cache)
    view.cache_dict = cache.cache_dict.stored()
    return view


def _read_at(cache: Any, device: torch.device) -> Any:
    """The same cache, also one in a plain dict, read on a device."""
    view = copy.copy(cache)
    if not isinstance(cache.cache_dict, CacheAtHome):
        view.cache_dict = CacheAtHome(device).of(cache.cache_dict)
    return view


def _model_of(cache: Any) -> Any:
    return cache.model.read if isinstance(cache.model, ReadOn) else cache.model


def _read_on(cache: Any) -> torch.device | None:
    """Where a cache is read; None if TransformerLens needs no help there."""
    if cache.model is None:
        return None
    placement = getattr(_model_of(cache), "placement", None)
    if chosen_device() is not None or placement is None:
        return chosen_device()
    if isinstance(cache.cache_dict, CacheAtHome):
        return cache.cache_dict.home
    lie_on = {tensor.device for tensor in cache.cache_dict.values()}
    return lie_on.pop() if len(lie_on) == 1 else placement.home

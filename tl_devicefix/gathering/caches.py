"""Caches whose activations stay where they were computed, and are copied home at each read.

The same dict serves for weights. Within `gather_on`, its device takes the place of home.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections import OrderedDict
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn

from tl_devicefix.dispatch.carrying import bring_home, move
from tl_devicefix.dispatch.hook_names import warn_of_empty, warn_of_unknown
from tl_devicefix.gathering.gathering import home_of, read_together
from tl_devicefix.monkeypatch.patch import patches
from tl_devicefix.placement.devices import with_index
from tl_devicefix.placement.in_use import chosen_device
from tl_devicefix.placement.placement import Placement


class CacheAtHome(dict[str, torch.Tensor]):
    """A cache of activations that stores each tensor where it was computed and reads it at home.

    A `functools.partial` stands for a tensor on disk: it is called each time that you ask for it.
    """

    def __init__(self, home: torch.device) -> None:
        super().__init__()
        self._home = home

    @property
    def home(self) -> torch.device:
        """The device that every read brings the tensor to."""
        return chosen_device(self._home) or self._home

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._at_home(super().__getitem__(name))

    def __missing__(self, name: str) -> torch.Tensor:
        raise KeyError(f"{name} is not in this cache: see cache.keys()")

    def _at_home(self, value: Any) -> Any:
        return move(_read(value), self.home)

    def stored(self) -> dict[str, torch.Tensor]:
        """The tensors where they were computed, as a plain dict."""
        get = super().__getitem__
        return {name: _read(get(name)) for name in self}

    def __iter__(self) -> Iterator[str]:
        # Defined because dict(cache) and {**cache} would otherwise bypass __getitem__.
        return super().__iter__()

    def __or__(self, other: Any) -> Any:
        return dict(self) | other

    def pop(self, name: str, *default: Any) -> Any:
        """As `dict.pop`, at home."""
        return self._at_home(super().pop(name, *default))

    def popitem(self) -> tuple[str, torch.Tensor]:
        """As `dict.popitem`, at home."""
        name, value = super().popitem()
        return name, self._at_home(value)

    # Mapping's versions, because a dict's own bypass `__getitem__`.
    get: Any = MutableMapping.get
    setdefault: Any = MutableMapping.setdefault
    items: Any = MutableMapping.items
    values: Any = MutableMapping.values

    def copy(self) -> CacheAtHome:
        """A shallow copy that reads at home too."""
        get = super().__getitem__
        return self.of({name: get(name) for name in self})

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> CacheAtHome:
        return self.of(copy.deepcopy(self.stored(), memo))

    def of(self, activations: Mapping[str, torch.Tensor]) -> CacheAtHome:
        """A cache of other activations, wherever they are, that is read where this one is."""
        new = type(self)(self._home)
        new.update(activations)
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Saved as a plain dict, because torch.load(weights_only=True) refuses other classes.
        return OrderedDict, (), None, None, iter(self.items())


def _read(value: Any) -> Any:
    return value() if isinstance(value, functools.partial) else value


def cache_for(model: Any, device: Any = None) -> CacheAtHome | None:
    """Make an empty cache that is read at home, or on a device; None for a model on one device."""
    placement: Placement | None = getattr(model, "placement", None)
    if placement is None or len(placement.devices) == 1:
        return None
    return CacheAtHome(placement.home if device is None else with_index(torch.device(device)))


_CACHING = "get_caching_hooks", "add_caching_hooks"
_CACHES, _AT_HOME = "self names_filter incl_bwd device", "cached activations are read at home"
_READ = "activations are read at home, or on the device of `gather_on`"
_STAY = "activations stay where they are"


@patches("HookedTransformer", *_CACHING, takes=_CACHES, why=_AT_HOME)
@patches("TransformerBridge", *_CACHING, takes=_CACHES, why=_AT_HOME, since="4.0")
def with_cache_at_home(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """`get_caching_hooks` and `add_caching_hooks`, with a cache that is read at home.

    With a `device` that the caller names, activations stay there and are read there. A model on one
    device, and a dict that the caller brings, are left as they are.
    """
    call = inspect.signature(original).bind(self, *args, **kwargs)
    names_filter = call.arguments.get("names_filter")
    warn_of_unknown(self, names_filter)
    if call.arguments.get("cache") is None:
        call.arguments["cache"] = cache_for(self, call.arguments.get("device"))
    result = original(*call.args, **call.kwargs)
    if isinstance(result, tuple):  # `add_caching_hooks` returns no hooks
        warn_of_empty(names_filter, result[1])
    return result


@patches("ActivationCache", "__getitem__", takes="self key", why=_READ)
def read_one(original: Any, self: Any, *args: Any) -> Any:
    """Replace `ActivationCache.__getitem__`: read at home, even from a plain dict."""
    device = _read_on(self)
    activation = original(self, *args)
    return activation if device is None else move(activation, device)


@patches("ActivationCache", "items", "values", takes="self", why=_READ)
def read_all(original: Any, self: Any) -> Any:
    """Replace `ActivationCache.items` and `values`: read at home, even from a plain dict."""
    device = _read_on(self)
    if device is None or isinstance(self.cache_dict, CacheAtHome):
        return original(self)
    return getattr(CacheAtHome(device).of(self.cache_dict), original.__name__)()


@patches(
    "ActivationCache",
    *("apply_ln_to_stack", "compute_head_results", "get_full_resid_decomposition"),
    *("get_neuron_results", "logit_attrs", "stack_head_results", "stack_neuron_results"),
    takes="self",
    why="cached activations meet weights on one device",
)
def reading_together(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap a method of ActivationCache that combines activations and weights of several blocks.

    They meet on the device on which the cache is read: home, the device of `gather_on`, or the one
    of `cache.to(...)`. Each block's head results are computed on the block's device and stay there
    until they are read, because they are larger than their inputs.
    """
    device = _read_on(self)
    if device is not None:
        args, kwargs = bring_home((args, kwargs), device)
    read = functools.partial(original, self, *args, **kwargs)
    name = original.__name__
    in_place = name == "compute_head_results"
    return read_together(device, self.model, f"cache.{name}", read, in_place)


@patches("ActivationCache", takes="self", why=_STAY)
def remove_batch_dim(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """`ActivationCache.remove_batch_dim`, which leaves each activation where it is."""
    if not isinstance(self.cache_dict, CacheAtHome):
        return original(self, *args, **kwargs)
    in_place = _in_place(self)
    original(in_place, *args, **kwargs)
    self.cache_dict.update(in_place.cache_dict)
    self.has_batch_dim = in_place.has_batch_dim
    return self


@patches("ActivationCache", takes="self batch_slice", why=_STAY)
def apply_slice_to_batch_dim(original: Any, self: Any, batch_slice: Any) -> Any:
    """`ActivationCache.apply_slice_to_batch_dim`, which leaves each activation where it is."""
    if not isinstance(self.cache_dict, CacheAtHome):
        return original(self, batch_slice)
    sliced = original(_in_place(self), batch_slice)
    sliced.cache_dict = self.cache_dict.of(sliced.cache_dict)
    return sliced


@patches(
    "ActivationCache",
    takes="self device",
    why="activations go there from where they are, not by way of home",
)
def to(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """`ActivationCache.to`: each activation goes there from where it is, not by way of home."""
    is_at_home = isinstance(self.cache_dict, CacheAtHome)
    moved = original(_in_place(self) if is_at_home else self, *args, **kwargs).cache_dict
    device = next(iter(_devices_of(moved).values()), None)
    if device is not None and (is_at_home or _is_spread(self.model)):
        moved = CacheAtHome(device).of(moved)  # then read there, not at home
    self.cache_dict = moved
    return self


def _devices_of(cache_dict: Mapping[str, Any]) -> dict[str, torch.device]:
    return {name: value.device for name, value in cache_dict.items() if hasattr(value, "device")}


def _is_spread(model: Any) -> bool:
    """Return True if a model's weights lie in several memories, one of which may be the host's."""
    placement: Placement | None = getattr(model, "placement", None)
    return placement is not None and len(placement.memories) > 1


def _in_place(cache: Any) -> Any:
    """Return the same cache, with each activation read where it was computed."""
    view = copy.copy(cache)
    view.cache_dict = cache.cache_dict.stored()
    return view


def _read_on(cache: Any) -> torch.device | None:
    """Return the device on which a cache is read; None if TransformerLens needs no help.

    Activations of a plain dict are read at home, unless all were moved to one device.
    """
    model = cache.model
    if (chosen := chosen_device(home_of(model))) is not None:
        return chosen
    if isinstance(cache.cache_dict, CacheAtHome):
        return cache.cache_dict.home
    devices = _devices_of(cache.cache_dict)
    lie_on = set(devices.values())
    if _is_spread(model):
        placement: Placement = model.placement
        was_brought = len(lie_on) == 1 and any(
            placement.device_for(name) != device for name, device in devices.items()
        )
        return lie_on.pop() if was_brought else placement.home
    weight = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    has_moved = weight is not None and len(lie_on) == 1 and weight.device not in lie_on
    return lie_on.pop() if has_moved else None


@patches(
    "SVDInterpreter",
    "__init__",
    takes="self model",
    why="weights of several devices are read at home, or on the device of `gather_on`",
)
def init_svd_interpreter(original: Any, self: Any, model: Any) -> None:
    """Wrap `SVDInterpreter.__init__`, which combines the weights of several components."""
    original(self, model)
    home = home_of(model)
    if home is not None and not isinstance(self.params, CacheAtHome):
        self.params = CacheAtHome(with_index(home)).of(self.params)

"""Caches of activations that stay where they were computed, and are read at home.

Also a dict of weights that stay where they lie. "Home" is the device of `gather_on` where that is
in force.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections import OrderedDict, UserDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tl_devicefix.dispatch.carrying import bring_home, move
from tl_devicefix.gathering.gathering import home_of, read_together
from tl_devicefix.monkeypatch.patch import patches
from tl_devicefix.placement.devices import with_index
from tl_devicefix.placement.in_use import chosen_device
from tl_devicefix.placement.placement import Placement


class CacheAtHome(UserDict[str, torch.Tensor]):
    """A cache of activations that stores each tensor where it was computed and reads it at home.

    A `functools.partial` stands for a tensor on disk: it is called each time that you ask for it.
    `data` has the tensors where they were computed.
    """

    def __init__(self, home: torch.device, data: Mapping[str, Any] | None = None) -> None:
        self.data = {} if data is None else dict(data)
        self._home = home

    @property
    def home(self) -> torch.device:
        """The device that every read brings the tensor to."""
        return chosen_device(self._home) or self._home

    def __getitem__(self, name: str) -> torch.Tensor:
        return move(_read(self.data[name]), self.home)

    def stored(self) -> dict[str, torch.Tensor]:
        """The tensors where they were computed, as a plain dict."""
        return {name: _read(value) for name, value in self.data.items()}

    def __or__(self, other: Any) -> Any:
        return dict(self) | other

    def copy(self) -> Any:
        """A shallow copy that reads at home too."""
        return self.of(self.data)

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.of(copy.deepcopy(self.stored(), memo))

    def of(self, activations: Mapping[str, Any]) -> Any:
        """A cache of other activations, wherever they are, that is read where this one is."""
        return CacheAtHome(self._home, activations)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Saved as a plain dict, at home, so that torch.load can load it with weights_only.
        return OrderedDict, (), None, None, iter(self.items())


def _read(value: Any) -> Any:
    return value() if isinstance(value, functools.partial) else value


def cache_for(model: Any, device: Any = None) -> Any:
    """An empty cache that is read at home, or on a device; None for a model on one device."""
    placement: Placement | None = getattr(model, "placement", None)
    if placement is None or len(placement.devices) == 1:
        return None
    return CacheAtHome(placement.home if device is None else with_index(torch.device(device)))


_CACHING = "get_caching_hooks", "add_caching_hooks"
_CACHES, _AT_HOME = "self names_filter incl_bwd device", "cached activations are read at home"
_READ = "activations are read at home, or on the device of `gather_on`"


@patches("HookedTransformer", *_CACHING, takes=_CACHES, why=_AT_HOME)
@patches("TransformerBridge", *_CACHING, takes=_CACHES, why=_AT_HOME, since="4.0")
def with_cache_at_home(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """`get_caching_hooks` and `add_caching_hooks`, with a cache that is read at home.

    With a `device` that the caller names, activations stay there and are read there. A model on one
    device, and a dict that the caller brings, are left as they are.
    """
    call = inspect.signature(original).bind(self, *args, **kwargs)
    if call.arguments.get("cache") is None:
        call.arguments["cache"] = cache_for(self, call.arguments.get("device"))
    return original(*call.args, **call.kwargs)


@patches("ActivationCache", "__getitem__", takes="self key", why=_READ)
def read_one(original: Any, self: Any, *args: Any) -> Any:
    """`ActivationCache.__getitem__`, also of a plain dict, as hooks have filled it: at home."""
    device = _read_on(self)
    activation = original(self, *args)
    return activation if device is None else move(activation, device)


@patches("ActivationCache", "items", "values", takes="self", why=_READ)
def read_all(original: Any, self: Any) -> Any:
    """`ActivationCache.items` and `values`, also of a plain dict, as hooks have filled it."""
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
    """A method of ActivationCache that reads activations and weights of several blocks together.

    They come to the device on which the cache is read: home, or that of `gather_on`, or where
    `cache.to(...)` brought it. Each block's head results are computed where the block runs, and
    stay there until they are read, as they are larger than what they are computed from.
    """
    device = _read_on(self)
    if device is not None:
        args, kwargs = bring_home((args, kwargs), device)
    read = functools.partial(original, self, *args, **kwargs)
    in_place = original.__name__ == "compute_head_results"
    return read_together(device, self.model, read, in_place)


@patches(
    "ActivationCache",
    *("remove_batch_dim", "apply_slice_to_batch_dim"),
    takes="self",
    why="activations stay where they are",
)
def change_where_it_lies(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """A method that changes every activation, where it was computed."""
    cache = self.cache_dict
    if not isinstance(cache, CacheAtHome):
        return original(self, *args, **kwargs)
    view = copy.copy(self)
    view.cache_dict = cache.stored()
    changed = original(view, *args, **kwargs)
    changed.cache_dict = cache.of(changed.cache_dict)
    if changed is not view:
        return changed
    vars(self).update(vars(view))
    return self


def _devices_of(cache_dict: Mapping[str, Any]) -> dict[str, torch.device]:
    return {name: value.device for name, value in cache_dict.items() if hasattr(value, "device")}


def _is_spread(model: Any) -> bool:
    """Whether a model's weights lie in several memories, one of which may be the host's."""
    placement: Placement | None = getattr(model, "placement", None)
    return placement is not None and len(placement.memories) > 1


def _read_on(cache: Any) -> torch.device | None:
    """Where a cache is read; None if TransformerLens needs no help there.

    A plain dict's activations are read at home if they lie where they were computed, and where they
    are if they were all brought to one device.
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
    """`SVDInterpreter.__init__`: it reads the weights of several components together."""
    original(self, model)
    home = home_of(model)
    if home is not None and not isinstance(self.params, CacheAtHome):
        self.params = CacheAtHome(with_index(home)).of(self.params)

"""Methods that make a cache of activations, and those of `ActivationCache` that read one.

A cache of a spread model is a `CacheAtHome`: what is read together is read at home.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import nn

from tl_devicefix.dispatch.carrying import move
from tl_devicefix.gathering.cache_at_home import CacheAtHome
from tl_devicefix.gathering.gathering import ReadOn, ReadWhereRun, home_of
from tl_devicefix.placement.devices import with_index
from tl_devicefix.placement.in_use import chosen_device, gather_nowhere, gather_on
from tl_devicefix.placement.placement import Placement
from tl_devicefix.tracebacks import noting_mixed_devices


def with_cache_at_home(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """`get_caching_hooks` and `add_caching_hooks`, with a cache that is read at home.

    With a `device` that the caller names, activations stay there and are read there. A model on one
    device, and a dict that the caller brings, are left as they are.
    """
    placement: Placement | None = getattr(self, "placement", None)
    if placement is None or len(placement.devices) == 1:
        return original(self, *args, **kwargs)
    given = inspect.signature(original).bind(self, *args, **kwargs)
    if given.arguments.get("cache") is None:
        device = given.arguments.get("device")
        read_on = placement.home if device is None else with_index(torch.device(device))
        given.arguments["cache"] = CacheAtHome(read_on)
    return original(*given.args, **given.kwargs)


def read_one(original: Any, self: Any, *args: Any) -> Any:
    """`ActivationCache.__getitem__`, also of a plain dict, as hooks have filled it: at home."""
    device = chosen_device(home_of(_model_of(self))) or _home_of_kept(self)
    activation = original(self, *args)
    return activation if device is None else move(activation, device)


def read_all(original: Any, self: Any, *args: Any) -> Any:
    """`ActivationCache.items` and `values`, also of a plain dict, as hooks have filled it."""
    device = chosen_device(home_of(_model_of(self))) or _home_of_kept(self)
    view = self if device is None else _read_at(self, device)
    return original(view, *args)


def _home_of_kept(cache: Any) -> torch.device | None:
    """Home, if a cache is of a plain dict whose activations lie where they were computed.

    None if they are read right where they are: they are a `CacheAtHome`, which knows, or were all
    brought to one device, or the model is on one.
    """
    model = _model_of(cache)
    if isinstance(cache.cache_dict, CacheAtHome) or not _is_of_several_devices(model):
        return None
    placement: Placement = model.placement
    there = {
        name: each.device for name, each in cache.cache_dict.items() if hasattr(each, "device")
    }
    spread = len(set(there.values())) > 1
    if spread or all(placement.device_for(name) == device for name, device in there.items()):
        return placement.home
    return None


def reading_together(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """A method of ActivationCache that reads activations and weights of several blocks together.

    They come to the device on which the cache is read: home, or that of `gather_on`, or where
    `cache.to(...)` brought it. The model stays where it is.
    """

    device = _read_on(self)
    if device is None:
        return original(self, *args, **kwargs)
    view = _read_at(self, device)
    view.model = ReadOn(_model_of(self), device)
    with gather_on(device), noting_mixed_devices():
        result = original(
            view,
            *(move(each, device) for each in args),
            **{key: move(each, device) for key, each in kwargs.items()},
        )
    if view.cache_dict is not self.cache_dict:
        _keep_head_results(view.cache_dict, self.cache_dict)
    return result


def _keep_head_results(read: CacheAtHome, cache_dict: dict[str, torch.Tensor]) -> None:
    """Add what a method has computed for later, where the rest of the plain dict is."""
    for name in read:
        if name not in cache_dict:
            cache_dict[name] = read[name]


def compute_head_results(original: Any, self: Any) -> None:
    """`ActivationCache.compute_head_results`, each block's on the block's own device.

    The results are larger than what they are computed from, and so stay there until they are read.
    """
    placement = getattr(_model_of(self), "placement", None)
    if not isinstance(self.cache_dict, CacheAtHome) or placement is None:
        reading_together(original, self)
        return
    in_place = _in_place(self)
    in_place.model = ReadWhereRun(_model_of(self))
    for name, value in in_place.cache_dict.items():
        if name.endswith("attn.hook_z"):  # someone may have put it elsewhere
            in_place.cache_dict[name] = move(value, placement.device_of(name))
    with gather_nowhere():
        original(in_place)
    self.cache_dict.update(in_place.cache_dict)


def remove_batch_dim(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """`ActivationCache.remove_batch_dim`, which leaves each activation where it is."""
    if not isinstance(self.cache_dict, CacheAtHome):
        return original(self, *args, **kwargs)
    in_place = _in_place(self)
    original(in_place, *args, **kwargs)
    self.cache_dict.update(in_place.cache_dict)
    self.has_batch_dim = in_place.has_batch_dim
    return self


def apply_slice_to_batch_dim(original: Any, self: Any, batch_slice: Any) -> Any:
    """`ActivationCache.apply_slice_to_batch_dim`, which leaves each activation where it is."""
    if not isinstance(self.cache_dict, CacheAtHome):
        return original(self, batch_slice)
    sliced = original(_in_place(self), batch_slice)
    sliced.cache_dict = self.cache_dict.of(sliced.cache_dict)
    return sliced


def to(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """`ActivationCache.to`: each activation goes there from where it is, not by way of home."""
    if not isinstance(self.cache_dict, CacheAtHome):
        original(self, *args, **kwargs)
        if _is_of_several_devices(_model_of(self)):
            self.cache_dict = _staying(self.cache_dict)
        return self
    moved = original(_in_place(self), *args, **kwargs).cache_dict
    self.cache_dict = _staying(moved)
    return self


def _staying(moved: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Activations that were brought to one device: they are read there, wherever home is."""
    device = next((each.device for each in moved.values()), None)
    return moved if device is None else CacheAtHome(device).of(moved)


def _is_of_several_devices(model: Any) -> bool:
    placement: Placement | None = getattr(model, "placement", None)
    return placement is not None and len(placement.devices) > 1


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
    chosen = chosen_device(home_of(_model_of(cache)))
    if chosen is not None:
        return chosen
    if isinstance(cache.cache_dict, CacheAtHome):
        return cache.cache_dict.home
    if (home := _home_of_kept(cache)) is not None:
        return home
    model = _model_of(cache)
    placement = getattr(model, "placement", None)
    lie_on = {each.device for each in cache.cache_dict.values() if hasattr(each, "device")}
    if placement is None:  # it is on one device; the cache may have been moved to another
        weight = next(model.parameters(), None) if isinstance(model, nn.Module) else None
        has_moved = weight is not None and len(lie_on) == 1 and weight.device not in lie_on
        return lie_on.pop() if has_moved else None
    return lie_on.pop() if len(lie_on) == 1 else placement.home

"""Caches, stacked weights and results from them: tensors of all devices, read on one.

That device is home, the model's first one, or that of `gather_on`. Activations stay where they were
computed, and each read copies one there. Weights are copied there when they are used, block by
block; the model stays where it is.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, TypeVar

import psutil
import torch
from jaxtyping import Shaped
from transformer_lens import ActivationCache
from transformer_lens.SVDInterpreter import SVDInterpreter

from tl_devicefix.around import Args, Forward, Kwargs
from tl_devicefix.dispatch.carrying import bring_home, move
from tl_devicefix.dispatch.mixing import JoinedAt, map_entries
from tl_devicefix.errors import noting_mixed_devices
from tl_devicefix.monkeypatch.patch import patches
from tl_devicefix.placement.devices import CPU, DeviceLike, free_memory, printed, with_index
from tl_devicefix.placement.in_use import chosen_device, gather_on
from tl_devicefix.placement.memory import gib
from tl_devicefix.placement.placement import Placement, placement_of
from tl_devicefix.types import Model

T = TypeVar("T")


def gathering_device(model: object) -> torch.device | None:
    """Return the device on which to combine a model's weights; None to leave them in place."""
    chosen, placement = chosen_device(), spread_placement(model)
    return placement.home if chosen is None and placement is not None else chosen


def spread_placement(model: object) -> Placement | None:
    """Return a model's placement if its weights lie in several memories, the host's included."""
    placement = placement_of(model)
    return None if placement is None or len(placement.memories) == 1 else placement


def home_of(model: object) -> torch.device | None:
    """Return a model's home device; None if it has none."""
    device = getattr(getattr(model, "cfg", None), "device", None)
    return None if device is None else torch.device(device)


class ReadAt(JoinedAt):
    """A mode in which functions written for one device can read a model on several.

    Args:
        device: the device that mixed operands are copied to, and that stacks are made on.
        model: the model, or whatever a cache has as its `model`.
        in_place: True to ignore the functions' own `.to(home)`, so that tensors move only when
            they are mixed with others; False to copy them to `device` instead.
    """

    def __init__(self, device: torch.device, model: object, in_place: bool) -> None:
        home, placement = home_of(model), placement_of(model)
        memories = () if placement is None else placement.memories
        super().__init__(device, frozenset({device, home or device, *memories}))
        self._home, self._in_place = home, in_place

    def target(self, tensors: list[torch.Tensor], devices: frozenset[torch.device]) -> torch.device:
        """Return the mode's device, or the one on which an offloaded weight's block runs."""
        # Offloaded weights are copied to the one other device, on which their block runs.
        others = devices - {CPU}
        return next(iter(others)) if len(others) == 1 and self._device != CPU else self._device

    def __torch_function__(
        self, func: Forward, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        # With `in_place`, the tensor stays for now: the next call may need only a few rows of W_U.
        is_brought = func is torch.Tensor.to and args[1:] in ((self._home,), (self._device,))
        if is_brought and not kwargs and args[0].device in self._devices:
            return args[0] if self._in_place else args[0].to(self._device)
        if func is torch.stack and len(args) == 1 and kwargs in (None, {}, {"dim": 0}):
            tensors = args[0]
            are_tensors = all(isinstance(tensor, torch.Tensor) for tensor in tensors)
            if are_tensors and len({(tensor.shape, tensor.dtype) for tensor in tensors}) == 1:
                check_room(sum(tensor.nbytes for tensor in tensors), self._device)
                return _StackOn.apply(self._device, *tensors)  # [block, *part]
        return super().__torch_function__(func, types, args, kwargs)


class _StackOn(torch.autograd.Function):
    """`torch.stack` of tensors on several devices, without a second copy; differentiable."""

    @staticmethod
    def forward(
        device: torch.device, *tensors: Shaped[torch.Tensor, "*part"]
    ) -> Shaped[torch.Tensor, "block ..."]:
        first = tensors[0]
        # `torch.stack` of copies would need memory for the copies and for the stack.
        stack = torch.empty((len(tensors), *first.shape), dtype=first.dtype, device=device)
        for part, tensor in zip(stack, tensors):
            part.copy_(tensor)  # [*part]
        return stack

    @staticmethod
    def setup_context(ctx: Any, inputs: Args, output: torch.Tensor) -> None:
        ctx.devices = [tensor.device for tensor in inputs[1:]]  # where the gradients have to be

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # [block, *part] -> [*part] of each block
        parts = zip(gradients[0].unbind(), ctx.devices, ctx.needs_input_grad[1:])
        return (None, *(part.to(device) if needed else None for part, device, needed in parts))


def check_room(needed: int, device: torch.device) -> None:
    """Check that a device has room for a stack before its parts are copied."""
    on_cpu = device.type == "cpu"  # `free_memory` does not report host memory
    room = psutil.virtual_memory().available if on_cpu else free_memory(device)
    if room is not None and needed > room:
        other = "" if on_cpu else 'within `with tl_devicefix.gather_on("cpu"):`, or '
        raise torch.OutOfMemoryError(
            f"a stack of all blocks takes {gib(needed)}, but {printed(device)} has {gib(room)} "
            f"free: read it {other}block by block"
        )


def read_together(
    device: torch.device | None, model: object, read: Callable[[], T], in_place: bool = True
) -> T:
    """Call `read` within `ReadAt`, and bring its result to `device`; without one, just call it."""
    if device is None:
        return read()
    with ReadAt(device, model, in_place), gather_on(device), noting_mixed_devices():
        result = read()
    return move(map_entries(result, lambda part: move(part, device)), device)


_KEY_VALUE_NAMES = ("W_K", "W_V", "b_K", "b_V")
_BLOCK_NAMES = ("W_Q", "W_O", "W_in", "W_gate", "W_out", "b_Q", "b_O", "b_in", "b_out")
_COMBINING_NAMES = ("accumulated_bias", "all_composition_scores", "tokens_to_residual_directions")
_SINGLE = ("W_E", "W_U", "b_U")
_GATHERS = "weights of several devices are read at home, or on the device of `gather_on`"


@patches("HookedTransformer", *_SINGLE, "W_pos", *_BLOCK_NAMES, *_COMBINING_NAMES, why=_GATHERS)
@patches("TransformerBridge", *_SINGLE, *_COMBINING_NAMES, "stack_params_for", why=_GATHERS)
@patches("TransformerBridge", "W_pos", why=_GATHERS, since="4.0")
@patches("TransformerBridge", "_stack_block_params", takes="self attr_path", why=_GATHERS)
def gathered(original: Callable[..., T], self: Model, *args: object, **kwargs: object) -> T:
    """Wrap a property or method that returns a weight, stacked weights, or a result from them."""
    read = functools.partial(original, self, *args, **kwargs)
    return read_together(gathering_device(self), self, read)


@patches("HookedTransformer", *_KEY_VALUE_NAMES, why=_GATHERS)
def stacked_key_value_heads(
    original: Callable[..., Shaped[torch.Tensor, "block head ..."]], self: Model
) -> Shaped[torch.Tensor, "block head ..."]:
    """Wrap HookedTransformer's W_K, W_V, b_K and b_V: repeat grouped heads after stacking."""
    attn: Any = self.blocks[0].attn
    name, device = original.__name__, gathering_device(self)
    if device is None or not hasattr(attn, f"_{name}"):
        return gathered(original, self)

    def repeated() -> torch.Tensor:
        # [block, key_head, ...]: repeat after stacking, so that fewer bytes cross devices.
        stack = torch.stack([getattr(block.attn, f"_{name}") for block in self.blocks])
        check_room(stack.nbytes * attn.repeat_kv_heads, device)
        return stack.repeat_interleave(attn.repeat_kv_heads, dim=1)  # [block, head, ...]

    return read_together(device, self, repeated)


class CacheAtHome(dict[str, torch.Tensor]):
    """A cache of activations that stores each tensor where it was computed and reads it at home.

    `SVDInterpreter` and a Bridge's `get_params` keep weights in this class, too.
    """

    def __init__(self, home: torch.device) -> None:
        super().__init__()
        self._home = home

    @property
    def home(self) -> torch.device:
        """The device that every read brings the tensor to: `gather_on`'s, or the cache's own."""
        return chosen_device() or self._home

    def __getitem__(self, name: str) -> torch.Tensor:
        return move(super().__getitem__(name), self.home)

    def stored(self) -> dict[str, torch.Tensor]:
        """Return the tensors where they were computed, as a plain dict."""
        return dict(super().items())

    def __iter__(self) -> Iterator[str]:
        # Without this override, dict(cache) and {**cache} would bypass __getitem__.
        return super().__iter__()

    def __or__(self, other: Any) -> Any:
        return dict(self) | other

    def pop(self, name: str, *default: Any) -> Any:
        """Return a tensor as `dict.pop` does, at home."""
        return move(super().pop(name, *default), self.home)

    def popitem(self) -> tuple[str, torch.Tensor]:
        """Return a name and a tensor as `dict.popitem` does, at home."""
        name, value = super().popitem()
        return name, move(value, self.home)

    if not TYPE_CHECKING:  # their types are those of dict's methods
        # dict's own methods bypass `__getitem__`.
        get, setdefault = MutableMapping.get, MutableMapping.setdefault
        items, values = MutableMapping.items, MutableMapping.values

    def copy(self) -> CacheAtHome:
        """Return a shallow copy with the same home."""
        return self.of(self.stored())

    __copy__ = copy  # otherwise `copy.copy` would use __reduce_ex__

    def __deepcopy__(self, memo: dict[int, object]) -> CacheAtHome:
        return self.of(copy.deepcopy(self.stored(), memo))

    def of(self, activations: Mapping[str, torch.Tensor]) -> CacheAtHome:
        """Return a cache of other activations, on any devices, with this cache's home."""
        new = type(self)(self._home)
        new.update(activations)
        return new

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        # Pickle it as an OrderedDict: torch.load(weights_only=True) refuses this class.
        return OrderedDict, (), None, None, iter(self.items())


def cache_for(model: Model, device: DeviceLike | None = None) -> CacheAtHome | None:
    """Return an empty cache, read at home or on `device`; None for a model on one device."""
    placement = placement_of(model)
    if placement is None or len(placement.devices) == 1:
        return None
    return CacheAtHome(placement.home if device is None else with_index(torch.device(device)))


_CACHING = "get_caching_hooks", "add_caching_hooks"
_CACHES, _AT_HOME = "self names_filter incl_bwd device", "cached activations are read at home"
_READ = "activations are read at home, or on the device of `gather_on`"


@patches("HookedTransformer", *_CACHING, takes=_CACHES, why=_AT_HOME)
@patches("TransformerBridge", *_CACHING, takes=_CACHES, why=_AT_HOME, since="4.0")
def caching_at_home(original: Callable[..., T], self: Model, *args: object, **kwargs: object) -> T:
    """Wrap `get_caching_hooks` and `add_caching_hooks`: the cache is read at home.

    If the caller names a `device`, activations are copied there and read there. A model on one
    device gets a plain dict, and a dict that the caller passes is used as it is.
    """
    call = inspect.signature(original).bind(self, *args, **kwargs)
    if call.arguments.get("cache") is None:
        call.arguments["cache"] = cache_for(self, call.arguments.get("device"))
    return original(*call.args, **call.kwargs)


@patches("ActivationCache", "__getitem__", takes="self key", why=_READ)
def read_one(original: Callable[..., T], self: ActivationCache, *args: object) -> T:
    """Wrap `ActivationCache.__getitem__`: read at home, even from a plain dict."""
    device = _read_on(self)
    activation = original(self, *args)
    return activation if device is None else move(activation, device)


@patches("ActivationCache", "items", "values", takes="self", why=_READ)
def read_all(original: Callable[..., Any], self: ActivationCache) -> Any:
    """Wrap `ActivationCache.items` and `values`: read at home, even from a plain dict."""
    device = _read_on(self)
    if device is None or isinstance(self.cache_dict, CacheAtHome):
        return original(self)
    return getattr(CacheAtHome(device).of(self.cache_dict), original.__name__)()


@patches(
    "ActivationCache",
    *("apply_ln_to_stack", "compute_head_results", "get_full_resid_decomposition"),
    *("get_neuron_results", "logit_attrs", "stack_head_results", "stack_neuron_results"),
    takes="self",
    why="cached activations and weights are brought to one device",
)
def reading_together(
    original: Callable[..., T], self: ActivationCache, *args: object, **kwargs: object
) -> T:
    """Wrap a method of ActivationCache that combines activations and weights of several blocks.

    They are copied to the device on which the cache is read: home, the device of `gather_on`, or
    the one of `cache.to(...)`.
    """
    device = _read_on(self)
    if device is not None:
        args, kwargs = bring_home((args, kwargs), device)  # such as `project_output_onto`
    read = functools.partial(original, self, *args, **kwargs)
    # Head results, [batch, pos, head, d_model], are larger than their factors: they are computed
    # on each block's device, and stay there until they are read.
    in_place = original.__name__ == "compute_head_results"
    return read_together(device, self.model, read, in_place)


@patches(
    "ActivationCache",
    *("remove_batch_dim", "apply_slice_to_batch_dim"),
    takes="self",
    why="activations stay where they are",
)
def changing_in_place(
    original: Callable[..., ActivationCache], self: ActivationCache, *args: object, **kwargs: object
) -> ActivationCache:
    """Wrap a method of ActivationCache that changes activations; they stay where they are."""
    kept = self.cache_dict
    if not isinstance(kept, CacheAtHome):
        return original(self, *args, **kwargs)
    in_place = _in_place(self)
    changed = original(in_place, *args, **kwargs)
    if changed is not in_place:  # a new cache, of a slice
        changed.cache_dict = kept.of(changed.cache_dict)
        return changed
    kept.update(in_place.cache_dict)  # TransformerLens keeps the dict object too
    self.has_batch_dim = in_place.has_batch_dim
    return self


@patches(
    "ActivationCache",
    takes="self device",
    why="activations are copied there directly, not by way of home",
)
def to(
    original: Callable[..., ActivationCache], self: ActivationCache, *args: object, **kwargs: object
) -> ActivationCache:
    """Wrap `ActivationCache.to`: each activation is copied directly to the device."""
    is_at_home = isinstance(self.cache_dict, CacheAtHome)
    moved = original(_in_place(self), *args, **kwargs).cache_dict
    device = next(iter(_device_by_name(moved).values()), None)
    if device is not None and (is_at_home or spread_placement(self.model) is not None):
        moved = CacheAtHome(device).of(moved)  # later reads are on that device
    self.cache_dict = moved
    return self


def _device_by_name(cache_dict: Mapping[str, object]) -> dict[str, torch.device]:
    return {name: value.device for name, value in cache_dict.items() if hasattr(value, "device")}


def _in_place(cache: ActivationCache) -> ActivationCache:
    """Return a cache that reads without copying home; `cache` itself if its dict is plain."""
    if not isinstance(cache.cache_dict, CacheAtHome):
        return cache
    in_place = copy.copy(cache)
    in_place.cache_dict = cache.cache_dict.stored()
    return in_place


def _read_on(cache: ActivationCache) -> torch.device | None:
    """Return the device on which a cache is read; None to leave activations where they are."""
    model = cache.model
    if (chosen := chosen_device()) is not None:
        return chosen
    if isinstance(cache.cache_dict, CacheAtHome):
        return cache.cache_dict.home
    placement = spread_placement(model)
    if placement is None:
        return None
    # A plain dict's activations are read at home, unless all were moved to one device.
    devices = _device_by_name(cache.cache_dict)
    lie_on = set(devices.values())
    was_brought = len(lie_on) == 1 and any(
        placement.device_for(name) != device for name, device in devices.items()
    )
    return lie_on.pop() if was_brought else placement.home


@patches(
    "SVDInterpreter",
    "__init__",
    takes="self model",
    why="weights of several devices are read at home, or on the device of `gather_on`",
)
def init_svd_interpreter(original: Callable[..., None], self: SVDInterpreter, model: Model) -> None:
    """Wrap `SVDInterpreter.__init__`, which combines the weights of several components."""
    original(self, model)
    home = home_of(model)
    if home is not None and not isinstance(self.params, CacheAtHome):
        self.params = CacheAtHome(with_index(home)).of(self.params)

"""Stacked weights of all blocks, and results from them, read at home or on `gather_on`'s device.

Weights are copied there when they are used, block by block; the model stays where it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import psutil
import torch
from jaxtyping import Shaped

from tl_devicefix.around import Args, Forward, Kwargs
from tl_devicefix.dispatch.carrying import move
from tl_devicefix.dispatch.mixing import JoinedAt, map_entries
from tl_devicefix.monkeypatch.patch import patches
from tl_devicefix.placement.devices import CPU, free_memory, printed
from tl_devicefix.placement.in_use import chosen_device, gather_on
from tl_devicefix.placement.memory import gib
from tl_devicefix.placement.placement import Placement, placement_of
from tl_devicefix.tracebacks import noting_mixed_devices
from tl_devicefix.types import Model

T = TypeVar("T")


def gathering_device(model: object) -> torch.device | None:
    """Return the device on which to combine a model's weights; None to leave them in place."""
    chosen, placement = chosen_device(home_of(model)), spread_placement(model)
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
        what: the name of what is read, for messages.
        in_place: True to ignore the functions' own `.to(home)`, so that tensors move only when
            they are mixed with others; False to copy them to `device` instead.
    """

    def __init__(self, device: torch.device, model: object, what: str, in_place: bool) -> None:
        home, placement = home_of(model), placement_of(model)
        memories = () if placement is None else placement.memories
        super().__init__(device, frozenset({device, home or device, *memories}))
        self._home, self._what, self._in_place = home, what, in_place

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
                check_room(sum(tensor.nbytes for tensor in tensors), self._device, self._what)
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


def check_room(needed: int, device: torch.device, what: str) -> None:
    """Check that a device has room for a tensor before it is copied."""
    on_cpu = device.type == "cpu"  # `free_memory` does not report host memory
    room = psutil.virtual_memory().available if on_cpu else free_memory(device)
    if room is not None and needed > room:
        other = "" if on_cpu else 'within `with tl_devicefix.gather_on("cpu"):`, or '
        raise torch.OutOfMemoryError(
            f"{what} is {gib(needed)}, but {printed(device)} has {gib(room)} free: read it {other}"
            "block by block"
        )


def read_together(
    device: torch.device | None,
    model: object,
    what: str,
    read: Callable[[], T],
    in_place: bool = True,
) -> T:
    """Call `read` within `ReadAt`, and bring its result to `device`; without one, just call it."""
    if device is None:
        return read()
    with ReadAt(device, model, what, in_place), gather_on(device), noting_mixed_devices():
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
    name = original.__name__
    if name == "_stack_block_params" and args:  # a path like "attn.W_Q"
        name = str(args[0]).rpartition(".")[2]
    read = functools.partial(original, self, *args, **kwargs)
    return read_together(gathering_device(self), self, f"model.{name}", read)


@patches("HookedTransformer", *_KEY_VALUE_NAMES, why=_GATHERS)
def stacked_key_value_heads(
    original: Callable[..., Shaped[torch.Tensor, "block head ..."]], self: Model
) -> Shaped[torch.Tensor, "block head ..."]:
    """Wrap HookedTransformer's W_K, W_V, b_K and b_V: repeat grouped heads after stacking."""
    attn: Any = self.blocks[0].attn
    name, device = original.__name__, gathering_device(self)
    if device is None or not hasattr(attn, f"_{name}"):
        return gathered(original, self)

    what = f"model.{name}"

    def repeated() -> torch.Tensor:
        # [block, key_head, ...]: repeat after stacking, so that fewer bytes cross devices.
        stack = torch.stack([getattr(block.attn, f"_{name}") for block in self.blocks])
        check_room(stack.nbytes * attn.repeat_kv_heads, device, what)
        return stack.repeat_interleave(attn.repeat_kv_heads, dim=1)  # [block, head, ...]

    return read_together(device, self, what, repeated)

"""Stacked weights of all blocks, and results from them, read on one device.

That device is home, or the one of `gather_on`. Weights are copied there when they are used, block
by block; the model stays where it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import psutil
import torch

from tl_devicefix.dispatch.carrying import move
from tl_devicefix.dispatch.mixing import JoinedAt, mapped
from tl_devicefix.monkeypatch.patch import patches
from tl_devicefix.placement.devices import HOST, free_memory, printed
from tl_devicefix.placement.in_use import chosen_device, gather_on
from tl_devicefix.placement.memory import gib
from tl_devicefix.tracebacks import noting_mixed_devices


def gathering_device(model: Any) -> torch.device | None:
    """Return the device on which to combine a model's weights; None if they are on one device."""
    placement = getattr(model, "placement", None)
    chosen = chosen_device(home_of(model))
    if chosen is None and placement is not None and len(placement.memories) > 1:
        return placement.home
    return chosen


def home_of(model: Any) -> torch.device | None:
    """Return a model's home device; None if it has none."""
    device = getattr(getattr(model, "cfg", None), "device", None)
    return None if device is None else torch.device(device)


class ReadAt(JoinedAt):
    """Within it, functions that are written for one device read a model on several.

    Tensors of two devices meet on the device of the reading; stacks are made there, in one copy.
    Weights that are offloaded come to the activations that they are used with. What the functions
    bring home comes to the device instead, or, `in_place`, stays where it is until it is used: of a
    W_U that is indexed, the rows are copied.
    """

    def __init__(self, device: torch.device, model: Any, what: str, in_place: bool) -> None:
        home, placement = home_of(model), getattr(model, "placement", None)
        memories = () if placement is None else placement.memories
        super().__init__(device, frozenset({device, home or device, *memories}))
        self._home, self._what, self._in_place = home, what, in_place

    def target(self, tensors: list[torch.Tensor], devices: frozenset[torch.device]) -> torch.device:
        """The device of the reading; if what is offloaded meets one other device, that one."""
        others = devices - {HOST}
        return next(iter(others)) if len(others) == 1 and self._device != HOST else self._device

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        is_brought = func is torch.Tensor.to and args[1:] in ((self._home,), (self._device,))
        if is_brought and not kwargs and args[0].device in self._devices:
            return args[0] if self._in_place else args[0].to(self._device)
        if func is torch.stack and len(args) == 1 and kwargs in (None, {}, {"dim": 0}):
            tensors = args[0]
            are_tensors = all(isinstance(tensor, torch.Tensor) for tensor in tensors)
            if are_tensors and len({(tensor.shape, tensor.dtype) for tensor in tensors}) == 1:
                check_room(sum(tensor.nbytes for tensor in tensors), self._device, self._what)
                return _StackOn.apply(self._device, *tensors)
        return super().__torch_function__(func, types, args, kwargs)


class _StackOn(torch.autograd.Function):
    """`torch.stack` of tensors on several devices, without a second copy; differentiable."""

    @staticmethod
    def forward(device: torch.device, *tensors: torch.Tensor) -> torch.Tensor:
        first = tensors[0]
        stack = torch.empty((len(tensors), *first.shape), dtype=first.dtype, device=device)
        for part, tensor in zip(stack, tensors):
            part.copy_(tensor)
        return stack

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.devices = [tensor.device for tensor in inputs[1:]]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        parts = zip(gradients[0].unbind(), ctx.devices, ctx.needs_input_grad[1:])
        return (None, *(part.to(device) if needed else None for part, device, needed in parts))


def check_room(needed: int, device: torch.device, what: str) -> None:
    """Check that a device has room for a tensor before it is copied."""
    on_cpu = device.type == "cpu"
    room = psutil.virtual_memory().available if on_cpu else free_memory(device)
    if room is not None and needed > room:
        other = "" if on_cpu else 'within `with tl_devicefix.gather_on("cpu"):`, or '
        raise torch.OutOfMemoryError(
            f"{what} is {gib(needed)}, but {printed(device)} has {gib(room)} free: read it {other}"
            "block by block"
        )


def read_together(
    device: torch.device | None,
    model: Any,
    what: str,
    read: Callable[[], Any],
    in_place: bool = True,
) -> Any:
    """Call a function that was written for one device, and bring its result to this device.

    Without a device, only call it. See `ReadAt` for the rest.
    """
    if device is None:
        return read()
    with ReadAt(device, model, what, in_place), gather_on(device), noting_mixed_devices():
        result = read()
    return move(mapped(result, lambda part: move(part, device)), device)


_OF_KEY_VALUE_HEADS = ("W_K", "W_V", "b_K", "b_V")
_OF_BLOCKS = ("W_Q", "W_O", "W_in", "W_gate", "W_out", "b_Q", "b_O", "b_in", "b_out")
STACKED = (*_OF_KEY_VALUE_HEADS, *_OF_BLOCKS)
"""Properties of a model that stack a weight of every block."""
_OF_SEVERAL = ("accumulated_bias", "all_composition_scores", "tokens_to_residual_directions")
_SINGLE = ("W_E", "W_U", "b_U")
_GATHERS = "weights of several devices are read at home, or on the device of `gather_on`"


@patches("HookedTransformer", *_SINGLE, "W_pos", *_OF_BLOCKS, *_OF_SEVERAL, why=_GATHERS)
@patches("TransformerBridge", *_SINGLE, *STACKED, *_OF_SEVERAL, "stack_params_for", why=_GATHERS)
@patches("TransformerBridge", "W_pos", why=_GATHERS, since="4.0")
def gathered(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap a property that returns a weight, a stack of all blocks' weights, or their product."""
    what = f"model.{original.__name__}"
    read = functools.partial(original, self, *args, **kwargs)
    return read_together(gathering_device(self), self, what, read)


@patches("HookedTransformer", *_OF_KEY_VALUE_HEADS, why=_GATHERS)
def of_key_value_heads(original: Any, self: Any) -> Any:
    """Wrap `HookedTransformer.W_K` and `W_V`: grouped heads are repeated after stacking."""
    name, attn = original.__name__, self.blocks[0].attn
    device = gathering_device(self)
    if device is None or not hasattr(attn, f"_{name}"):
        return gathered(original, self)

    what = f"model.{name}"

    def repeated() -> torch.Tensor:
        stack = torch.stack([getattr(block.attn, f"_{name}") for block in self.blocks])
        check_room(stack.nbytes * attn.repeat_kv_heads, device, what)
        return stack.repeat_interleave(attn.repeat_kv_heads, dim=1)

    return read_together(device, self, what, repeated)

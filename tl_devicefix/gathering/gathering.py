"""What is spread over the blocks, read on one device: stacked weights, and what is made from them.

That device is home, or the one of `gather_on`. Weights are copied there when they are read, block
by block; the model stays where it is.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import psutil
import torch
from torch import nn

from tl_devicefix.dispatch.carrying import move
from tl_devicefix.monkeypatch.patch import patches
from tl_devicefix.placement.devices import free_memory, printed
from tl_devicefix.placement.in_use import chosen_device, gather_on
from tl_devicefix.placement.memory import gib
from tl_devicefix.tracebacks import noting_mixed_devices


def gathering_device(model: Any) -> torch.device | None:
    """Where a model's weights are read together; None if they are where they should be."""
    placement = getattr(model, "placement", None)
    chosen = chosen_device(home_of(model))
    if chosen is None and placement is not None and len(placement.memories) > 1:
        return placement.home
    return chosen


def home_of(model: Any) -> torch.device | None:
    """Where a model is at home; None if it does not say."""
    device = getattr(getattr(model, "cfg", None), "device", None)
    return None if device is None else torch.device(device)


STACKED = {
    **{name: f"attn.{name}" for name in ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O")},
    **{name: f"mlp.{name}" for name in ("W_in", "W_gate", "W_out", "b_in", "b_out")},
}
"""HookedTransformer's properties that stack a weight of every block: name -> path in the block."""


def stack_on(
    device: torch.device, weights: Sequence[torch.Tensor], what: str, copies: int = 1
) -> torch.Tensor:
    """Weights of several blocks, each from its own device, stacked on one; differentiable.

    Where `copies` times their size is not free, the error says `what` they are.
    """
    check_room(copies * sum(weight.nbytes for weight in weights), device, what)
    stack: torch.Tensor = _StackOn.apply(device, *weights)
    return stack


_GATHERS = "weights of several devices are read at home, or on the device of `gather_on`"
_READ_THERE = "read on the device of `gather_on`"


@patches("HookedTransformer", "W_E", "W_U", "b_U", "W_pos", why=_READ_THERE)
@patches("TransformerBridge", "W_E", "W_U", "b_U", why=_READ_THERE)
@patches("TransformerBridge", "W_pos", why=_GATHERS, since="4.0")
def single_weight(original: Any, self: Any) -> Any:
    """The getter of `HookedTransformer.W_E` and its like: a copy, if it is read elsewhere."""
    weight, device = original(self), gathering_device(self)
    if device is None or weight.device == device:
        return weight
    check_room(weight.nbytes, device, f"model.{original.__name__}")
    return weight.to(device)


@patches("HookedTransformer", *STACKED, why="stack weights of any devices in one copy")
def stacked(original: Any, self: Any) -> Any:
    """The getter of `HookedTransformer.W_Q` and its like: [n_layers, ...], in one copy."""
    name = original.__name__
    path = STACKED[name].split(".")
    device = gathering_device(self)
    if device is None or (name == "W_gate" and not self.cfg.gated_mlp):
        return original(self)
    repeats = 1
    if hasattr(self.blocks[0].attn, f"_{path[-1]}"):  # of key-value heads, each for its group
        repeats = self.blocks[0].attn.repeat_kv_heads
        path = ["attn", f"_{path[-1]}"]
    weights = [functools.reduce(getattr, path, block) for block in self.blocks]
    stack = stack_on(device, weights, f"model.{name}", 1 if repeats == 1 else repeats + 1)
    return stack.repeat_interleave(repeats, dim=1) if repeats > 1 else stack


class _StackOn(torch.autograd.Function):
    """torch.stack of tensors of any devices on one, without a second copy; differentiable."""

    @staticmethod
    def forward(device: torch.device, *weights: torch.Tensor) -> torch.Tensor:
        first = weights[0]
        stack = torch.empty((len(weights), *first.shape), dtype=first.dtype, device=device)
        for layer, weight in enumerate(weights):
            stack[layer].copy_(weight)
        return stack

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.devices = [weight.device for weight in inputs[1:]]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        parts = zip(gradients[0].unbind(), ctx.devices, ctx.needs_input_grad[1:])
        return (None, *(part.to(device) if needed else None for part, device, needed in parts))


def check_room(needed: int, device: torch.device, what: str) -> None:
    """Check that there is room for something before anything of it is copied."""
    on_cpu = device.type == "cpu"
    room = psutil.virtual_memory().available if on_cpu else free_memory(device)
    if room is not None and needed > room:
        other = "" if on_cpu else 'within `with tl_devicefix.gather_on("cpu"):`, or '
        raise torch.OutOfMemoryError(
            f"{what} is {gib(needed)}, but {printed(device)} has {gib(room)} free: read it {other}"
            "block by block from model.blocks"
        )


class ReadOn:
    """A model, or a module of it, whose tensors are read on one device.

    For methods of TransformerLens that are written for one device: they are given this as `self`.
    The module stays where it is, and each tensor is copied when it is read.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.read = module
        self._device = device

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.read, name)
        if isinstance(value, nn.ModuleList):
            return [ReadOn(module, self._device) for module in value]
        if isinstance(value, nn.Module):
            return ReadOn(value, self._device)
        if name == "cfg":
            value = copy.copy(value)
            value.device = str(self._device)
        return move(value, self._device)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module where it is, and bring the result to the device."""
        runs_on = next((weight.device for weight in self.read.parameters()), self._device)
        args = tuple(move(value, runs_on) for value in args)
        kwargs = {name: move(value, runs_on) for name, value in kwargs.items()}
        return move(self.read(*args, **kwargs), self._device)


class ReadWhereRun:
    """A model on several devices, the weights of each block read where the block runs.

    That is where they are, unless the block is offloaded.
    """

    def __init__(self, model: Any) -> None:
        device_of = model.placement.read_at
        self.cfg = model.cfg
        self.blocks = [
            ReadOn(block, device_of(f"blocks.{layer}")) for layer, block in enumerate(model.blocks)
        ]


@patches("HookedTransformer", "accumulated_bias", takes="self", why=_GATHERS)
@patches("HookedTransformer", "all_composition_scores", takes="self mode", why=_GATHERS)
@patches("TransformerBridge", "accumulated_bias", takes="self", why=_GATHERS)
@patches("TransformerBridge", "all_composition_scores", takes="self mode", why=_GATHERS)
def gathered(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """A method of a model that reads weights of several components together."""
    device = gathering_device(self)
    if device is None:
        return original(self, *args, **kwargs)
    with gather_on(device), noting_mixed_devices():
        return original(ReadOn(self, device), *args, **kwargs)


@patches("HookedTransformer", takes="self tokens", why=_GATHERS)
@patches("TransformerBridge", takes="self tokens", why=_GATHERS)
def tokens_to_residual_directions(original: Any, self: Any, tokens: Any) -> torch.Tensor:
    """See TransformerLens's. The directions are read from W_U where that is, and gathered."""
    device = gathering_device(self)
    if device is None:
        return original(self, tokens)
    with gather_on(self.unembed.W_U.device):
        directions = original(self, move(tokens, self.unembed.W_U.device))
    return move(directions, device)

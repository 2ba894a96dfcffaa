"""Bring what a component takes or returns to a device; skip blocks whose output is known.

When a forward skips blocks, everything else runs as usual: tokens are embedded, masks and positions
are made, and the first block that runs gets the residual stream as if those before it had run.
TransformerLens's `start_at_layer` is no replacement, because a Bridge's runs the blocks before it
all the same, and a HookedTransformer's needs masks made by hand.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tl_devicefix.around import Args, Around, Forward, Kwargs
from tl_devicefix.dispatch.mixing import mapped
from tl_devicefix.dispatch.scheduler import current_run, moving_to
from tl_devicefix.fusing.one_forward import made_once
from tl_devicefix.placement.devices import is_elsewhere
from tl_devicefix.placement.placement import Placement
from tl_devicefix.placement.remote_tensor import plain


def move(value: Any, device: torch.device) -> Any:
    """Bring a tensor to a device, one of another host too; leave anything else alone."""
    value = plain(value)
    if isinstance(value, torch.Tensor) and value.device != device:
        run = current_run()
        return value.to(device) if run is None else run.send(value, device)
    return value


def bring_home(output: Any, home: torch.device) -> Any:
    """Bring a tensor, or the tensors in what a component returns, to the home device."""
    if isinstance(output, torch.Tensor):
        return move(output, home)
    return mapped(output, lambda part: bring_home(part, home))


@dataclass(frozen=True)
class CarryTo(Around):
    """Brings a component's arguments to its device. Nothing else moves the residual stream there.

    The other arguments are a block's own KV cache, and masks and rotary tables, which are copied
    once in a forward for each device. For a block of another host we move no tensors, and only hand
    over the turn of a run in flight.
    """

    device: torch.device

    def pre_forward(self, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Return the arguments, on the device."""
        if SkipBlock.of(module) is not None:  # because it reads none of them
            return args, kwargs
        if is_elsewhere(self.device):
            with moving_to(self.device):
                return args, kwargs
        if args:  # what other hosts compute is awaited in their turn, not in that of this device
            args = (plain(args[0]), *args[1:])
        with moving_to(self.device):
            residual = vars(module).get("_start_residual")  # of a Bridge's `start_at_layer`
            if residual is not None:
                vars(module)["_start_residual"] = move(residual, self.device)
            if args:
                args = (move(args[0], self.device), *map(self._on_device, args[1:]))
            carried = {
                name: move(value, self.device) if name in _STREAM else self._on_device(value)
                for name, value in kwargs.items()
                if value is not None
            }
            return args, {**kwargs, **carried}

    def _on_device(self, value: Any) -> Any:
        if value is None:
            return None
        if isinstance(value, torch.Tensor):
            return value if value.device == self.device else self._copied_once(value)
        if hasattr(value, "past_keys") and hasattr(value, "past_values"):
            value.past_keys = move(value.past_keys, self.device)
            value.past_values = move(value.past_values, self.device)
            return value
        return mapped(value, self._on_device)

    def _copied_once(self, tensor: torch.Tensor) -> torch.Tensor:
        what = type(self), torch.is_grad_enabled()
        return made_once((tensor,), what, self.device, lambda: move(tensor, self.device))


_STREAM = ("hidden_states", "residual")
"""Names of the residual stream, which each block has another of."""


@dataclass(frozen=True)
class BringHome(Around):
    """Brings a component's output to the home device."""

    home: torch.device

    def post_forward(self, module: nn.Module, args: Args, output: Any) -> Any:
        """Return the output, at home."""
        with moving_to(self.home):
            return bring_home(output, self.home)


def carry(model: Any, placement: Placement, brings_home: Callable[[str], bool]) -> None:
    """Bring arguments to all components, and outputs home from those that `brings_home` names."""
    for component, module in placement.modules_of(model):
        CarryTo(component.device).attach(module)
        if brings_home(component.name) and not is_elsewhere(component.device):
            BringHome(placement.home).attach(module)


def not_carried_to(model: Any, placement: Placement) -> list[str]:
    """Return the components that nothing is carried to, because somebody put them in later."""
    if len(placement.devices) == 1:
        return []
    return [
        component.name
        for component, module in placement.here.modules_of(model)
        if all(
            getattr(hook, "__self__", None) != CarryTo(component.device)
            for hook in module._forward_pre_hooks.values()
        )
    ]


# --------------------------------------------------------------------------------------------
# Blocks that a forward skips


@contextlib.contextmanager
def skipping(blocks: Sequence[nn.Module], first: int, output: Any) -> Iterator[None]:
    """Within it, a forward begins at block `first` of all blocks; it may be their number.

    `output` is what the block before has returned, in whatever form it does, and is left as it is.
    """
    with contextlib.ExitStack() as stack:
        for block in blocks[:first]:
            SkipBlock(output, block is blocks[first - 1]).attach(block)
            stack.callback(SkipBlock.detach, block)
        yield


def output_of(block: nn.Module, run: Callable[[], Any]) -> Any:
    """Return the output of a block in a forward, which ends there."""
    stop = StopAfter()
    stop.attach(block)
    try:
        with contextlib.suppress(_Reached):
            run()
    finally:
        StopAfter.detach(block)
    return stop.output


class _Reached(Exception):
    """Ends a forward at the block whose output was asked for."""


class StopAfter(Around):
    """Keeps a block's output, and ends the model's forward."""

    output: Any

    def forward(self, module: nn.Module, run: Forward, args: Args, kwargs: Kwargs) -> Any:
        """Run the block, and nothing after it."""
        self.output = run(*args, **kwargs)
        raise _Reached


class SkipBlock(Around):
    """Returns a block's known output; the last block's is a copy, because hooks may change it."""

    def __init__(self, output: Any, is_last: bool) -> None:
        self._output = output
        self._is_last = is_last

    def forward(self, module: nn.Module, run: Forward, args: Args, kwargs: Kwargs) -> Any:
        """Return the output."""
        return copied(self._output) if self._is_last else self._output


def copied(output: Any) -> Any:
    """Copy the residual stream in a block's output, which is a tensor or a tuple's first."""
    if isinstance(output, torch.Tensor):
        return output.clone()
    return type(output)((output[0].clone(), *output[1:]))

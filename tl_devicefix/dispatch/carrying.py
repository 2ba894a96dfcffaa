"""Bring what a component takes or returns to a device; skip blocks whose output is known.

PyTorch hooks on a model's components carry. Of a forward that skips blocks, all else is as ever:
tokens are embedded, masks and positions are made, and the first block that is not skipped gets the
residual stream as if those below it had run. TransformerLens's own `start_at_layer` does otherwise:
a Bridge's runs the blocks below all the same, and a HookedTransformer's wants masks made by hand.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tl_devicefix.around import AroundForward
from tl_devicefix.dispatch.mixing import mapped
from tl_devicefix.dispatch.scheduler import current_run, going_to
from tl_devicefix.fusing.one_forward import made_once
from tl_devicefix.placement.devices import is_elsewhere
from tl_devicefix.placement.in_use import setting
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


_unread = ContextVar("_unread", default=False)


def outputs_unread() -> contextlib.AbstractContextManager[None]:
    """Within it, nobody reads what a model returns, so it stays where it was computed."""
    return setting(_unread, True)


def is_output_read() -> bool:
    """Whether somebody may read what a model returns, which is at home then."""
    return not _unread.get()


@dataclass(frozen=True)
class CarryTo:
    """Forward pre-hook: bring to a component's device what it takes.

    The residual stream, a block's own KV cache, and what all blocks take: masks, rotary tables.
    These are copied once in a forward for each device, not for each block. To a block of another
    host goes nothing but the turn of a run in flight. It holds a device and no module, so that a
    copied or pickled model keeps working.
    """

    device: torch.device

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments, on the device."""
        if _Skipped.of(module) is not None:  # nothing needs to be brought to it
            return args, kwargs
        if is_elsewhere(self.device):
            with going_to(self.device, module):
                return args, kwargs
        if args:  # what other hosts compute is awaited in their turn, not in that of this device
            args = (plain(args[0]), *args[1:])
        with going_to(self.device, module):
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
class BringHome:
    """Forward hook: bring what a component returns to the home device."""

    home: torch.device

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return the output, at home."""
        with going_to(self.home):
            return bring_home(output, self.home)


def carry(model: Any, placement: Placement, brings_home: Callable[[str], bool]) -> list[Any]:
    """Have what components take come to them; outputs come home of those that `brings_home`."""
    handles = []
    for component, module in placement.modules_of(model):
        carry_to = CarryTo(component.device)
        handles.append(module.register_forward_pre_hook(carry_to, with_kwargs=True))
        if brings_home(component.name) and not is_elsewhere(component.device):
            handles.append(module.register_forward_hook(BringHome(placement.home)))
    return handles


def not_carried_to(model: Any, placement: Placement) -> list[str]:
    """The components that lack the hook of `carry`, as someone put them in after it."""
    if len(placement.devices) == 1:
        return []
    return [
        component.name
        for component, module in placement.here.modules_of(model)
        if CarryTo(component.device) not in module._forward_pre_hooks.values()
    ]


# --------------------------------------------------------------------------------------------
# Blocks that a forward skips


_first: ContextVar[int] = ContextVar("first", default=0)
"""The first block that the forward of this thread runs."""


def first_block() -> int:
    """The index of the first block that is not skipped."""
    return _first.get()


@contextlib.contextmanager
def skipping(blocks: Sequence[nn.Module], first: int, output: Any) -> Iterator[None]:
    """Within it, a forward begins at block `first` of all blocks; it may be their number.

    `output` is what the block before has returned, in whatever form it does, and is left as it is.
    """
    with setting(_first, first), contextlib.ExitStack() as stack:
        for block in blocks[:first]:
            stack.enter_context(_Skipped(block, output, block is blocks[first - 1]))
        yield


def output_of(block: nn.Module, run: Callable[[], Any]) -> Any:
    """What a block returns in a forward, which ends there."""
    kept = _Kept(block)
    with kept, contextlib.suppress(_Reached):
        run()
    return kept.output


class _Reached(Exception):
    """Ends a forward at the block whose output was asked for."""


class _Kept(AroundForward):
    """Keeps what a block returns, and ends the forward."""

    output: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.output = self.run(*args, **kwargs)
        raise _Reached


class _Skipped(AroundForward):
    """Returns what a block that is skipped would; the last, a copy, which hooks may change."""

    def __init__(self, block: nn.Module, output: Any, is_last: bool) -> None:
        super().__init__(block)
        self._output = output
        self._is_last = is_last

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return copied(self._output) if self._is_last else self._output


def copied(output: Any) -> Any:
    """What a block returns, with a residual stream of its own: a tensor, or a tuple's first."""
    if isinstance(output, torch.Tensor):
        return output.clone()
    return type(output)((output[0].clone(), *output[1:]))

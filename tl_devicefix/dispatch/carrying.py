"""Move components' inputs and outputs between devices; skip blocks whose output is known.

When a forward skips blocks, everything else runs as usual: tokens are embedded, masks and positions
are made. TransformerLens's `start_at_layer` would not do: a Bridge runs the blocks before that
layer all the same, and a HookedTransformer needs masks made by hand.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn

from tl_devicefix.around import Args, Around, AroundForward, Forward, Kwargs
from tl_devicefix.dispatch.mixing import map_entries
from tl_devicefix.dispatch.scheduler import copy_to, moving_to, run_ahead
from tl_devicefix.fusing.one_forward import cached_for_forward
from tl_devicefix.placement.elsewhere import is_elsewhere, plain
from tl_devicefix.placement.placement import Placement
from tl_devicefix.types import Model

T = TypeVar("T")
BlockOutput: TypeAlias = torch.Tensor | tuple[Any, ...]
"""The residual stream, alone or first in a tuple."""


def move(value: T, device: torch.device) -> T:
    """Bring a tensor, even a remote one, to a device; return anything else as it is."""
    moved: Any = plain(value)
    if isinstance(moved, torch.Tensor) and moved.device != device:
        moved = copy_to(moved, device)
    return moved


def bring_home(output: T, home: torch.device) -> T:
    """Bring a tensor, or the tensors in a tuple, list or dict, to the home device."""
    if isinstance(output, torch.Tensor):
        return move(output, home)
    return map_entries(output, lambda part: bring_home(part, home))


@dataclass(frozen=True)
class CarryTo(Around):
    """Brings a component's arguments to its device. In a forward, it alone moves the stream."""

    device: torch.device

    def pre_forward(self, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Return the arguments, on the device."""
        skip = SkipBlock.of(module)
        if skip is not None and not skip.is_over:  # a skipped block reads none of them
            return args, kwargs
        ahead = run_ahead()
        if ahead is not None and args:
            ahead.begin(module, args[0])
        if is_elsewhere(self.device):
            # No tensor can be there: a run in flight only waits for its turn.
            with moving_to(self.device):
                return args, kwargs
        if args:
            # Fetch a remote value first: that may run remote blocks and their hooks.
            args = (plain(args[0]), *args[1:])
        with moving_to(self.device):
            # A Bridge's `start_at_layer` sets the stream on every block; one of them reads it.
            residual = vars(module).get("_start_residual")
            start = vars(module).get("_start_at_layer_idx")
            if residual is not None:
                index = getattr(module, "_extract_layer_idx", lambda: None)  # others ignore it
                if index() == start:
                    vars(module)["_start_residual"] = move(residual, self.device)
            if args:  # the residual stream: [batch, pos, d_model]
                args = (move(args[0], self.device), *map(self._on_device, args[1:]))
            # Most arguments of most blocks are None.
            carried = {
                name: move(value, self.device) if name in _STREAM else self._on_device(value)
                for name, value in kwargs.items()
                if value is not None
            }
            return args, {**kwargs, **carried}

    def _on_device(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.device == self.device:
                return value
            # All blocks get the same mask and rotary tables: copy them once per forward and per
            # grad mode. A copy that was made without gradients is in no graph.
            what = type(self), torch.is_grad_enabled()
            return cached_for_forward((value,), what, self.device, lambda: move(value, self.device))
        # A block's own entry of a HookedTransformer's KV cache.
        if hasattr(value, "past_keys") and hasattr(value, "past_values"):
            value.past_keys = move(value.past_keys, self.device)
            value.past_values = move(value.past_values, self.device)
            return value
        return map_entries(value, self._on_device)


# Each block gets a different tensor under these names, so they are copied for each block.
_STREAM = ("hidden_states", "residual")


@dataclass(frozen=True)
class BringHome(Around):
    """Brings a component's output to the home device."""

    home: torch.device

    def post_forward(self, module: nn.Module, args: Args, output: object) -> object:
        """Return the output, at home."""
        with moving_to(self.home):
            return bring_home(output, self.home)


def carry(model: Model, placement: Placement, brings_home: Callable[[str], bool]) -> None:
    """Attach hooks: arguments go to each component, outputs home if `brings_home(name)` is True."""
    for component, module in placement.modules_of(model):
        CarryTo(component.device).attach(module)
        if brings_home(component.name) and not is_elsewhere(component.device):
            BringHome(placement.home).attach(module)


def not_carried_to(model: Model, placement: Placement) -> list[str]:
    """Return the components replaced since `carry`: their arguments are not carried."""
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


class Skipping:
    """Lets one forward of a model begin at a later block.

    The wrappers around the blocks are made once: a run pays one assignment for each skipped block.
    """

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        self._blocks = list(blocks)
        self._skip = SkipBlock()
        self._attributes = list(map(vars, self._blocks))
        self._forwards = [AroundForward(self._skip, block) for block in self._blocks]

    @contextlib.contextmanager
    def until(self, first: int, output: BlockOutput | None, n_times: int = 1) -> Iterator[None]:
        """Make a forward within the `with` block begin at block `first`, from `output`.

        Args:
            first: the block's index; `len(blocks)` skips them all.
            output: the output of the block before; None if `first` is 0.
            n_times: how often the batch is repeated.
        """
        if not first:
            yield
            return
        skipped = list(zip(self._attributes[:first], self._forwards))
        self._skip.begin(output, self._blocks[first - 1], n_times)
        for attributes, forward in skipped:
            forward.inner = attributes.get("forward")
            attributes["forward"] = forward
        try:
            yield
        finally:
            for attributes, forward in skipped:
                if forward.inner is None:
                    del attributes["forward"]
                else:
                    attributes["forward"] = forward.inner
            self._skip.begin(None, None)


def run_blocks(
    blocks: Sequence[nn.Module],
    run: Callable[[], object],
    keep: Callable[[int, BlockOutput], None],
) -> None:
    """Call `run`, which ends after the last of `blocks`; pass each block's output to `keep`."""
    stop = StopAfter(blocks[-1], keep)
    try:
        for block in blocks:
            stop.attach(block)
        with contextlib.suppress(_Reached):
            run()
    finally:
        for block in blocks:
            StopAfter.detach(block)


class _Reached(Exception):
    """Ends a forward at the last block whose output was asked for."""


class StopAfter(Around):
    """Passes on the outputs of blocks, and ends the model's forward at the last of them."""

    def __init__(self, last: nn.Module, keep: Callable[[int, BlockOutput], None]) -> None:
        self._last, self._keep, self._n = last, keep, 0

    def forward(self, module: nn.Module, run: Forward, args: Args, kwargs: Kwargs) -> object:
        """Run the block, and nothing after the last one."""
        output: Any = run(*args, **kwargs)
        self._keep(self._n, output)
        self._n += 1
        if module is self._last:
            raise _Reached
        return output


class SkipBlock(Around):
    """Returns a known output instead of running the first blocks, in one forward.

    Attributes:
        is_over: True once the last skipped block has returned the output. If a later hook
            starts another forward, that one runs all blocks.
    """

    is_over = True

    def begin(self, output: BlockOutput | None, last: nn.Module | None, n_times: int = 1) -> None:
        """Make blocks up to `last` return `output`, its batch repeated; `last=None` ends this."""
        self._output, self._last, self._n_times = output, last, n_times
        self.is_over = last is None

    def forward(self, module: nn.Module, run: Forward, args: Args, kwargs: Kwargs) -> object:
        """Return the known output; the last skipped block returns a copy."""
        if self.is_over:
            return run(*args, **kwargs)
        if module is not self._last or self._output is None:
            return self._output
        self.is_over = True
        # Copy it: a hook of the next block may change it in place, and other runs start from it.
        return change_stream(self._output, lambda stream: repeated(stream, self._n_times))


def repeated(batch: torch.Tensor, n_times: int) -> torch.Tensor:
    """Return a copy of a tensor with its first dimension repeated."""
    return batch.repeat(n_times, *[1] * (batch.dim() - 1))


def change_stream(
    output: BlockOutput, change: Callable[[torch.Tensor], torch.Tensor]
) -> BlockOutput:
    """Return a block's output with the residual stream in it changed."""
    if isinstance(output, torch.Tensor):
        return change(output)
    return type(output)((change(output[0]), *output[1:]))


def stream_of(output: BlockOutput) -> torch.Tensor:
    """Return the residual stream in a block's output."""
    return output if isinstance(output, torch.Tensor) else output[0]

"""Offloaded blocks: their weights live in host memory, and are on a device while the block runs.

While one block computes, the next one's weights are copied, so two blocks at a time are there:

    computes     block 0      block 1      block 2
    is copied    block 1 ->   block 2 ->   block 3 ->
    is there     0, 1         1, 2         2, 3

`OffloadedForward` swaps weights in before a block's forward, and the parameters back after it, also
after an error. `Prefetch` knows the order in which one forward runs its blocks. Blocks that a hook
runs, or a forward that it starts, add their own copies.

Runs of a `pipeline_map` share no copies. Each prefetches to the device that it holds, and drops
that when it releases the device, so all runs together have two blocks there. A run that waits in a
block, such as for random numbers of a hook, keeps that block's weights meanwhile.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from tl_devicefix.around import Args, Around, Forward, Kwargs
from tl_devicefix.fusing.one_forward import kept_in_forward
from tl_devicefix.offload.copying import BlockCopy, Place, keeping_on_host
from tl_devicefix.placement.devices import CPU, module_with_streams
from tl_devicefix.placement.placement import Placement
from tl_devicefix.types import Model

# Threads may run one model, whose parameters are exchanged while others copy them.
_exchanging = threading.RLock()


def offload_blocks(model: Model, placement: Placement) -> None:
    """Have each offloaded block's weights on its device while it runs."""
    for block, device in _offloaded(model, placement):
        OffloadedForward(block, device).attach(block)
    pin(model, placement)


def pin(model: Model, placement: Placement) -> None:
    """Pin the weights of offloaded blocks, because only pinned memory is copied asynchronously."""
    for block, device in _offloaded(model, placement):
        if module_with_streams(device) is not None:
            for parameter in block.parameters():
                if parameter.device == CPU and not parameter.is_pinned():
                    parameter.data = parameter.data.pin_memory()


def _offloaded(model: Model, placement: Placement) -> Iterator[tuple[nn.Module, torch.device]]:
    for component in placement.components:
        if component.offloaded:
            yield model.get_submodule(component.name), component.device


class OffloadedForward(Around):
    """Swaps an offloaded block's weights in before it runs, and out after it."""

    def __init__(self, block: nn.Module, device: torch.device) -> None:
        self.module = block
        self.device = device
        self._runs = 0  # because a hook, or another thread, may run the block while it runs
        self._copy: BlockCopy | None = None

    def forward(self, module: nn.Module, run: Forward, args: Args, kwargs: Kwargs) -> object:
        """Return the block's output."""
        prefetch = kept_in_forward().get(Prefetch)
        with contextlib.nullcontext(prefetch) if prefetch else Prefetch([]) as prefetch:
            self._swap_in(prefetch)
            try:
                with keeping_on_host(self._copy.weights if self._copy else ()):
                    return run(*args, **kwargs)
            finally:
                self._swap_out()

    def copied(self) -> BlockCopy:
        """Start to copy the weights, as they are now."""
        return BlockCopy(self.places(), self.device)

    def places(self) -> Iterator[Place]:
        """Yield each parameter that lives in host memory, also while a copy is in its place."""
        weights = self._copy.weights if self._copy else ()
        hosts = {id(one.weight): one.host for one in weights}
        for module in self.module.modules():
            for name, parameter in module._parameters.items():
                host = hosts.get(id(parameter), parameter)
                if host is not None and host.device == CPU:
                    yield Place(module, name, host)

    # Functions of their own, because names in `forward` would keep weights that are swapped out.

    def _swap_in(self, prefetch: Prefetch) -> None:
        with _exchanging:
            if self._runs and self._copy is not None:  # another run of it is under way
                self._copy.share()
            else:
                # Known before they are in, because the next run undoes what an interrupt leaves.
                self._copy = prefetch.take(self)
                self._copy.swap_in()
            self._runs += 1

    def _swap_out(self) -> None:
        with _exchanging:
            self._runs -= 1
            if not self._runs and self._copy is not None:
                self._copy.swap_out()
                self._copy = None


class Prefetch:
    """Copies of the offloaded blocks that one forward runs next, at most one on each device."""

    def __init__(self, blocks: Iterable[OffloadedForward]) -> None:
        self._to_run: dict[torch.device, deque[OffloadedForward]] = {}
        for block in blocks:
            self._to_run.setdefault(block.device, deque()).append(block)
        self._next: dict[torch.device, BlockCopy] = {}
        self._last: dict[torch.device, BlockCopy] = {}  # begun last, so they arrive last

    def __enter__(self) -> Prefetch:
        return self

    def start(self) -> None:
        """Start to copy the first block of each device."""
        with _exchanging:
            for device in self._to_run:
                self._start_next(device)

    def take(self, block: OffloadedForward) -> BlockCopy:
        """Return the weights of a block that runs now, and start to copy those of the next one."""
        device, queue = block.device, self._to_run.get(block.device, deque())
        if block in queue:  # or else a hook runs it
            while queue.popleft() is not block:  # because a forward may skip blocks
                pass
        copy = self._next.pop(device, None)
        if copy is not None and not copy.is_current(block.places()):
            # Because a hook has changed the weights since, or runs a block out of turn.
            copy.drop()
            copy = None
        if copy is None:
            copy = self._last[device] = block.copied()
        try:
            self._start_next(device)
        except BaseException:
            copy.drop()
            raise
        return copy

    def _start_next(self, device: torch.device) -> None:
        queue = self._to_run.get(device)
        if queue:
            self._next[device] = self._last[device] = queue[0].copied()

    def drop(self, device: torch.device) -> None:
        """Drop the copy that waits on a device, if there is one."""
        with _exchanging:
            copy = self._next.pop(device, None)
            if copy is not None:
                copy.drop()

    def __exit__(self, *error: object) -> None:
        """Drop copies that no block has used, and wait until parameters may be changed."""
        # Because the user may write to a parameter once the forward has returned.
        for device in self._to_run:
            self.drop(device)
        for copy in self._last.values():
            copy.wait_until_read()


@contextlib.contextmanager
def prefetching(
    model: Model, start_at_layer: int | None, stop_at_layer: int | None, *, is_in_flight: bool
) -> Iterator[None]:
    """Within it, a forward runs these blocks, and offloaded ones are copied before they run.

    A run in flight has no device yet, so its first copies start where its first blocks run.
    """
    blocks = list(getattr(model, "blocks", ()))[start_at_layer:stop_at_layer]
    with Prefetch(filter(None, map(OffloadedForward.of, blocks))) as prefetch:
        kept_in_forward()[Prefetch] = prefetch
        if not is_in_flight:
            prefetch.start()
        yield


def drop_prefetched(device: torch.device) -> None:
    """Drop what this thread's forward has prefetched to a device, which its run releases."""
    prefetch = kept_in_forward().get(Prefetch)
    if prefetch is not None:
        prefetch.drop(device)

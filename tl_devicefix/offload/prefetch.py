"""Offloaded blocks: their weights live in host memory, and are on a device while the block runs.

While one block computes, the next one's weights are copied, so a device holds two blocks' weights:

    computes     block 0      block 1      block 2
    is copied    block 1 ->   block 2 ->   block 3 ->
    is there     0, 1         1, 2         2, 3

`OffloadedForward` replaces a block's parameters with copies before its forward, and restores them
after it, even after an error. `OffloadedPart` does so for a part of a block that is called by
itself, such as to recompute it in backward. `Prefetch` knows the order in which one forward runs
its blocks. A hook that runs another block or forward needs memory for further copies.

Runs of a `pipeline_map` share no copies. A run drops its prefetched copy when it releases the
device, so a device normally holds two blocks. A run that waits inside a block, e.g. for a hook's
random numbers, keeps that block's weights, so there may be more.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

import torch
from torch import nn

from tl_devicefix.around import Args, Around, Forward, Kwargs
from tl_devicefix.fusing.one_forward import forward_cache
from tl_devicefix.offload.copying import BlockCopy, Place, keeping_on_host, refuse_changed
from tl_devicefix.placement.devices import CPU, SharedMemory, module_with_streams
from tl_devicefix.placement.placement import Placement
from tl_devicefix.types import Model

_swapping = threading.RLock()
"""The lock for swapping and copying parameters: several threads may run one model."""


def offload_blocks(model: Model, placement: Placement) -> None:
    """Attach an `OffloadedForward` to each offloaded block, and pin its weights."""
    for block, device in _offloaded_blocks(model, placement):
        OffloadedForward(block, device).attach(block)
    pin(model, placement)


def pin(model: Model, placement: Placement) -> None:
    """Pin the weights of offloaded blocks: only pinned memory is copied asynchronously."""
    for block, device in _offloaded_blocks(model, placement):
        if module_with_streams(device) is not None:
            sharing = SharedMemory(block)
            for parameter in block.parameters():
                if parameter.device == CPU and not parameter.is_pinned():
                    parameter.data = sharing.moved(parameter.data, torch.Tensor.pin_memory)


def _offloaded_blocks(
    model: Model, placement: Placement
) -> Iterator[tuple[nn.Module, torch.device]]:
    for component, block in placement.modules_of(model):
        if component.offloaded:
            yield block, component.device


class OffloadedForward(Around):
    """Swaps an offloaded block's parameters for copies on its device during its forward."""

    def __init__(self, block: nn.Module, device: torch.device) -> None:
        self.module = block
        self.device = device
        # How many calls are running: several if a hook or another thread calls the block too.
        self._calls = 0
        self._copy: BlockCopy | None = None

    def forward(self, module: nn.Module, run: Forward, args: Args, kwargs: Kwargs) -> object:
        """Run the block with its weights on the device."""
        prefetch = forward_cache().get(Prefetch)
        with contextlib.nullcontext(prefetch) if prefetch else Prefetch([]) as prefetch:
            self._swap_in(prefetch)
            try:
                with keeping_on_host(self._copy.weights if self._copy else ()):
                    output = run(*args, **kwargs)
            finally:
                changed = self._swap_out()
            refuse_changed(changed)  # not in `finally`: a user's error comes first
            return output

    def places(self) -> Iterator[Place]:
        """Yield each parameter in host memory, including those that copies replace at present."""
        weights = self._copy.weights if self._copy else ()
        return _places(self.module, {id(one.weight): one.host for one in weights})

    def is_running(self) -> bool:
        """Return True while the block runs: its weights are on the device then."""
        return self._calls > 0

    # These are methods: local names in `forward` would keep swapped-out copies alive.

    def _swap_in(self, prefetch: Prefetch) -> None:
        with _swapping:
            if self._calls and self._copy is not None:  # another call is running
                self._copy.share()
            else:
                # Assign before `swap_in`: if that is interrupted, the next call's `places` finds
                # the host parameters in `_copy`.
                self._copy = prefetch.take(self)
                self._copy.swap_in()
            self._calls += 1

    def _swap_out(self) -> str | None:
        changed = None
        with _swapping:
            self._calls -= 1
            if not self._calls and self._copy is not None:
                changed = self._copy.swap_out()
                self._copy = None
        return changed


def _places(
    root: nn.Module, hosts: Mapping[int, nn.Parameter] = MappingProxyType({})
) -> Iterator[Place]:
    for module in root.modules():
        for name, parameter in module._parameters.items():
            host = hosts.get(id(parameter), parameter)
            if host is not None and host.device == CPU:
                yield Place(module, name, host)


class OffloadedPart(Around):
    """Puts a part's weights on the device if the part is called while its block does not run."""

    def __init__(self, block: OffloadedForward) -> None:
        self.block = block

    def forward(self, module: nn.Module, run: Forward, args: Args, kwargs: Kwargs) -> object:
        """Run the part with its weights on the device."""
        places = [] if self.block.is_running() else [*_places(module)]
        if not places:
            return run(*args, **kwargs)
        copy = BlockCopy(places, self.block.device)
        # Omit `keeping_on_host`: in a recomputation, checkpoint's own hooks must see what they
        # saw in the forward.
        try:
            with _swapping:
                copy.swap_in()
            output = run(*args, **kwargs)
        finally:
            with _swapping:
                changed = copy.swap_out()
            copy.wait_until_read()
        refuse_changed(changed)
        return output


def attach_parts(block: nn.Module, root: nn.Module) -> None:
    """Attach an `OffloadedPart` to each module with weights in an offloaded block.

    `root` is the block, or a layer that is called instead of it.
    """
    offloaded = OffloadedForward.of(block)
    if offloaded is not None:
        for module in root.modules():
            OffloadedPart.detach(module)
            if module is not block and next(module.parameters(), None) is not None:
                OffloadedPart(offloaded).attach(module)


class Prefetch:
    """The offloaded blocks that a forward has yet to run, and each device's prefetched copy."""

    def __init__(self, blocks: Iterable[OffloadedForward]) -> None:
        self._to_run: dict[torch.device, deque[OffloadedForward]] = {}
        for block in blocks:
            self._to_run.setdefault(block.device, deque()).append(block)
        self._prefetched: dict[torch.device, BlockCopy] = {}
        # Keep each device's last copy: earlier ones arrive before it.
        self._last_started: dict[torch.device, BlockCopy] = {}

    def __enter__(self) -> Prefetch:
        return self

    def start(self) -> None:
        """Start to copy the first block of each device."""
        with _swapping:
            for device in self._to_run:
                self._start_next(device)

    def take(self, block: OffloadedForward) -> BlockCopy:
        """Return the copy of a block that runs now, and start to copy the next block."""
        device, queue = block.device, self._to_run.get(block.device, deque())
        if block in queue:  # not if a hook runs the block again
            while queue.popleft() is not block:  # a forward may skip blocks
                pass
        copy = self._prefetched.pop(device, None)
        if copy is not None and not copy.is_current(block.places()):
            # A hook changed the weights after they were copied, or this is another block.
            copy.drop()
            copy = None
        if copy is None:
            copy = self._last_started[device] = BlockCopy(block.places(), device)
        try:
            self._start_next(device)
        except BaseException:
            copy.drop()
            raise
        return copy

    def _start_next(self, device: torch.device) -> None:
        queue = self._to_run.get(device)
        if queue:
            copy = self._last_started[device] = BlockCopy(queue[0].places(), device)
            self._prefetched[device] = copy

    def drop(self, device: torch.device) -> None:
        """Drop the prefetched copy on a device, if no block has taken it."""
        with _swapping:
            copy = self._prefetched.pop(device, None)
            if copy is not None:
                copy.drop()

    def __exit__(self, *error: object) -> None:
        """Drop copies that no block has used, and wait until all copies have read the parameters.

        After the forward, the user may write to the parameters.
        """
        for device in self._to_run:
            self.drop(device)
        for copy in self._last_started.values():
            copy.wait_until_read()


@contextlib.contextmanager
def prefetching(
    model: Model, start_at_layer: int | None, stop_at_layer: int | None, *, is_in_flight: bool
) -> Iterator[None]:
    """Copy the offloaded blocks of one forward ahead of their turn, within a `with` block.

    A run in flight holds no device yet: its first block starts the first copy.
    """
    blocks = list(getattr(model, "blocks", ()))[start_at_layer:stop_at_layer]
    with Prefetch(filter(None, map(OffloadedForward.of, blocks))) as prefetch:
        forward_cache()[Prefetch] = prefetch
        if not is_in_flight:
            prefetch.start()
        yield


def drop_prefetched(device: torch.device) -> None:
    """Drop what this thread's forward has prefetched to a device that its run releases."""
    prefetch = forward_cache().get(Prefetch)
    if prefetch is not None:
        prefetch.drop(device)

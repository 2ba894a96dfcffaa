"""Offloaded blocks: their weights live in host memory, and are on a device while the block runs.

While one block computes, the next one's weights are copied, so a device holds two blocks' weights:

    computes     block 0      block 1      block 2
    is copied    block 1 ->   block 2 ->   block 3 ->
    is there     0, 1         1, 2         2, 3

A part of a block may also be called by itself, such as to recompute it in backward. A hook that
runs another block or forward needs memory for further copies.

Where a device has streams, copies run on a separate one, into memory allocated on the computing
stream, which waits for a block's copies before the block runs. Autograd keeps host parameters
instead of copies.

Runs of a `pipeline_map` share no copies. A run drops its prefetched copy when it releases the
device, so a device holds two blocks.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from tl_devicefix.around import Args, Around, Forward, Kwargs
from tl_devicefix.fusing.one_forward import forward_cache
from tl_devicefix.placement.devices import (
    CPU,
    SharedMemory,
    module_with_streams,
    stamp,
    storage_of,
)
from tl_devicefix.placement.placement import Placement
from tl_devicefix.types import Model

_swapping = threading.RLock()
"""The lock for swapping and copying parameters: several threads may run one model."""


class Place(NamedTuple):
    """A module, the name of one of its parameters, and that parameter, in host memory."""

    module: nn.Module
    name: str
    host: nn.Parameter

    def state(self) -> tuple[object, ...]:
        """Return what differs once the parameter is changed."""
        return self.module, self.name, stamp(self.host)


@functools.cache
def _weights_stream(device: torch.device) -> torch.Stream:
    return module_with_streams(device).Stream(device)


class BlockCopy:
    """The weights of one block on a device: copies that are started and awaited together.

    Attributes:
        device: where the copies are.
        weights: the copies, which replace the parameters between `swap_in` and `swap_out`.
    """

    def __init__(self, places: Iterable[Place], device: torch.device) -> None:
        self.device = device
        self.weights: list[PrefetchedWeight] = []
        self._streams = module_with_streams(device)
        self._allocated_on: Any = self._streams.current_stream(device) if self._streams else None
        self._done: Any = None  # an event, where there are streams
        try:
            for place in places:
                self.weights.append(PrefetchedWeight(place, place.state(), self._start(place.host)))
        except BaseException:  # also an interrupt: copies that have begun go on
            self._record()
            self.drop()
            raise
        self._record()

    @torch.inference_mode(False)  # torch does not count changes of inference tensors
    @torch.no_grad()
    def _start(self, host: torch.Tensor) -> torch.Tensor:
        # Allocate on the computing stream: the allocator then reuses memory in that stream's order,
        # so Python that runs ahead of the device takes no more memory.
        copy = torch.empty_like(host, device=self.device, requires_grad=False)
        if self._streams is None:
            return copy.copy_(host)
        # Wait before each weight: another thread may have queued kernels meanwhile, and freed the
        # memory that they use.
        stream = _weights_stream(self.device)
        stream.wait_stream(self._streams.current_stream(self.device))
        with self._streams.stream(stream):
            return copy.copy_(host, non_blocking=True)

    def _record(self) -> None:
        if self._streams is not None:
            self._done = _weights_stream(self.device).record_event()  # after all copies so far

    def is_current(self, places: Iterable[Place]) -> bool:
        """Return True if these parameters were copied, and have not been changed since."""
        return [weight.state for weight in self.weights] == [place.state() for place in places]

    def swap_in(self) -> None:
        """Replace the parameters with the copies."""
        self.share()
        for weight in self.weights:
            weight.swap_in()

    def swap_out(self) -> str | None:
        """Put the parameters back, and drop the copies.

        Returns:
            The name of a parameter that was changed while its copy was in use, if any.
        """
        changed = [weight.place.name for weight in self.weights if weight.is_changed()]
        for weight in self.weights:
            weight.swap_out()
        self.drop()
        return changed[0] if changed else None

    def share(self) -> None:
        """Make the current stream wait for the copies, and mark their memory as used by it."""
        # Each thread has its current stream, and a hook may run a block in another thread.
        if self._streams is None:
            return
        stream = self._streams.current_stream(self.device)
        stream.wait_event(self._done)
        if stream != self._allocated_on:
            for copy in self.weights:
                copy.weight.record_stream(stream)  # so that it is not reused too early

    def drop(self) -> None:
        """Drop the copies."""
        if self._streams is not None:
            # Even an unused copy must arrive before its memory is reused.
            self._allocated_on.wait_event(self._done)
        self.weights = []

    def wait_until_read(self) -> None:
        """Wait until host memory has been read, so that it may be changed."""
        if self._done is not None:
            self._done.synchronize()


def refuse_changed(name: str | None) -> None:
    """Raise if `BlockCopy.swap_out` has returned the name of a parameter."""
    if name is not None:
        raise RuntimeError(
            f"{name} of an offloaded block was changed or frozen while the block ran with a copy "
            "of it: do so before the forward, or in a hook on an earlier block"
        )


class PrefetchedWeight:
    """A weight on a device, which takes the place of a parameter in host memory.

    `state` is the parameter's, from before it was copied. The values arrive in `copy` later.
    """

    def __init__(self, place: Place, state: tuple[object, ...], copy: torch.Tensor) -> None:
        self.place, self.state, self.host = place, state, place.host
        with torch.enable_grad():  # a parameter requires its gradient under no_grad too
            self.weight: torch.Tensor = _Copied.apply(self.host, copy)
        self._stamp = stamp(self.weight)

    def is_changed(self) -> bool:
        """Return True if a hook has changed the parameter or the weight."""
        return self.place.state() != self.state or stamp(self.weight) != self._stamp

    def swap_in(self) -> None:
        """Replace the parameter with the weight."""
        # The weight has a graph, through which its gradient reaches the parameter.
        parameters: dict[str, Any] = self.place.module._parameters
        parameters[self.place.name] = self.weight

    def swap_out(self) -> None:
        """Put the parameter back, unless a hook has assigned another one."""
        parameters = self.place.module._parameters
        if parameters.get(self.place.name) is self.weight:
            parameters[self.place.name] = self.host


class _Copied(torch.autograd.Function):
    """Passes the gradient of a copy on to its parameter."""

    @staticmethod
    def forward(ctx: object, host: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        return copy.detach()

    @staticmethod
    def backward(ctx: object, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0].to(CPU), None  # where the parameter is


def keeping_on_host(
    weights: Iterable[PrefetchedWeight],
) -> contextlib.AbstractContextManager[object]:
    """Return a context in which autograd keeps host parameters instead of copies on a device.

    Backward copies each parameter to the device again when it is needed. Hooks around the context,
    such as those of `checkpoint` and `save_on_cpu`, get all other tensors.
    """
    if not torch.is_grad_enabled():
        return contextlib.nullcontext()
    # The functions below may hold no copies: the graph keeps these functions alive.
    hosts = {storage_of(one.weight): (one.host, one.weight.dtype) for one in weights}

    # torch itself calls only the innermost pair of hooks.
    outer = torch._C._autograd._top_saved_tensors_default_hooks(False)

    def save(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        # Find it by its storage: autograd keeps views of weights, too, transposed or split by head.
        host, dtype = hosts.get(storage_of(tensor), (None, None))
        if host is None or tensor.dtype != dtype:
            if outer is not None:
                return functools.partial(outer[1], outer[0](tensor))
            return functools.partial(_unchanged, tensor.detach(), tensor._version)
        view = (tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
        return functools.partial(_copied_again, host, host._version, tensor.device, view)

    return torch.autograd.graph.saved_tensors_hooks(save, lambda restore: restore())


def _unchanged(tensor: torch.Tensor, version: int) -> torch.Tensor:
    # torch leaves this check to the hooks of saved tensors.
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an "
            f"inplace operation: {tuple(tensor.shape)} on {tensor.device} is at version "
            f"{tensor._version}; expected version {version} instead"
        )
    return tensor


@torch.no_grad()
def _copied_again(
    host: torch.Tensor, version: int, device: torch.device, view: tuple[Any, Any, int]
) -> torch.Tensor:
    """Copy a parameter to a device; return the view with this shape, strides and offset."""
    copy = torch.empty_like(host, device=device, requires_grad=False)
    # The copy blocks: the parameter may be changed once backward has returned.
    return copy.copy_(_unchanged(host, version)).as_strided(*view)


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


def _places(root: nn.Module, hosts: Mapping[int, nn.Parameter]) -> Iterator[Place]:
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
        places = [] if self.block.is_running() else [*_places(module, {})]
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
        for path, module in root.named_modules():
            OffloadedPart.detach(module)
            # torch computes a parametrized weight where the original is, also to remove it.
            if module is block or "parametrizations" in path.split("."):
                continue
            if next(module.parameters(), None) is not None:
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

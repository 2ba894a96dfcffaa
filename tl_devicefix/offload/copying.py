"""Copies of offloaded weights on a device, made while it computes; and what autograd keeps of them.

Where a device has streams, copies run on a separate one, into memory allocated on the computing
stream, which waits for a block's copies before the block runs.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from tl_devicefix.placement.devices import CPU, module_with_streams, stamp, storage_of


class Place(NamedTuple):
    """A module, the name of one of its parameters, and that parameter, in host memory."""

    module: nn.Module
    name: str
    host: nn.Parameter


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
        # Of each parameter when it was copied.
        self._states: list[tuple[object, tuple[object, ...]]] = []
        try:
            for place in places:
                self._states.append((place[:2], stamp(place.host)))
                self.weights.append(PrefetchedWeight(place, self._start(place.host)))
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
        return self._states == [(place[:2], stamp(place.host)) for place in places]

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
        changed = None
        n_of_storage = Counter(storage_of(weight.host) for weight in self.weights)
        for weight, (_, state) in zip(self.weights, self._states):
            # Of weights that share memory, such as a Bridge's q and qkv, each has its own copy.
            shares = n_of_storage[storage_of(weight.host)] > 1
            is_changed = stamp(weight.host) != state or (shares and weight.is_edited())
            weight.swap_out(keep=is_changed)
            changed = weight.name if is_changed else changed
        self.drop()
        return changed

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
            "of it: do so before the forward, or, if it shares its memory with no other weight, in "
            "a hook with the weight of its module (model.blocks[2].mlp.W_out)"
        )


class PrefetchedWeight:
    """A weight on a device, which takes the place of a parameter in host memory."""

    def __init__(self, place: Place, copy: torch.Tensor) -> None:
        self._module, self.name, self.host = place
        with torch.enable_grad():  # a parameter requires its gradient under no_grad too
            self.weight: torch.Tensor = _Copied.apply(self.host, copy)
        self._stamp = stamp(self.weight)

    def is_edited(self) -> bool:
        """Return True if a hook has changed the weight, which takes the parameter's place."""
        is_in = self._module._parameters.get(self.name) is self.weight
        return is_in and stamp(self.weight) != self._stamp

    def swap_in(self) -> None:
        """Replace the parameter with the weight."""
        # The weight has a graph, through which its gradient reaches the parameter.
        self._module._parameters[self.name] = self.weight  # type: ignore[assignment]

    def swap_out(self, keep: bool) -> None:
        """Put the parameter back, with the values that a hook may have given the weight.

        A parameter that a hook has assigned stays; with `keep`, its own values stay.
        """
        is_edited = self.is_edited()
        if self._module._parameters.get(self.name) is not self.weight:
            return
        self._module._parameters[self.name] = self.host
        if is_edited and not keep:
            with torch.no_grad():
                self.host.copy_(self.weight)


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

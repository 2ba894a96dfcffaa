"""Weights sent from host memory to a device, beside what it computes; and kept for backward.

Copies are on a stream of their own, where a device has streams; elsewhere a copy is done at once.
Their memory is taken on the stream that computes, where what was there before has left it. So a
copy starts as soon as what was computed with that memory is done, and no more memory is taken
however far the program runs ahead of the device. What a graph keeps of the weights for backward is
the host's.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tl_devicefix.placement.devices import HOST


def wait_until_copied(device: torch.device) -> None:
    """Return when all copies to a device that were started have read the host's memory.

    Until then, what the host writes there may be what is copied.
    """
    if module_with_streams(device) is not None:
        _copy_stream(device).synchronize()


def module_with_streams(device: torch.device) -> Any:
    """torch's module of the device, if that has streams: it copies pinned memory as it computes."""
    module = torch.get_device_module(device.type)
    return module if hasattr(module, "Stream") and device.type != "cpu" else None


@functools.cache
def _copy_stream(device: torch.device) -> Any:
    return module_with_streams(device).Stream(device)


class Sent:
    """Weights on their way to a device: copies that are started together, and can be waited for."""

    def __init__(self, hosts: Iterable[torch.Tensor], device: torch.device) -> None:
        self._device = device
        self._streams = module_with_streams(device)
        # The stream on which memory is taken, and for which it is free again when it is let go.
        self._taken_on: Any = self._streams.current_stream(device) if self._streams else None
        self._done: Any = None
        self._hosts: list[torch.Tensor] = []
        self.copied: list[torch.Tensor] = []
        try:
            for host in hosts:
                self._hosts.append(host)
                self.copied.append(self._start(host))
        except BaseException:
            self._all_started()
            self.wait()  # the memory of those that were started is about to be given back
            raise
        self._all_started()
        self._values = [values_of(host) for host in self._hosts]
        self._for_inference = torch.is_inference_mode_enabled()

    @torch.no_grad()
    def _start(self, host: torch.Tensor) -> torch.Tensor:
        """Start to copy a tensor; the copy is laid out as the tensor is."""
        copy = torch.empty_like(host, device=self._device, requires_grad=False)
        if self._streams is None:
            return copy.copy_(host)
        # The memory is free when what is queued by now has been computed, by any thread: one
        # may have queued something, and freed what it used, since the copy before.
        stream = _copy_stream(self._device)
        stream.wait_stream(self._streams.current_stream(self._device))
        with self._streams.stream(stream):
            return copy.copy_(host, non_blocking=True)

    def _all_started(self) -> None:
        if self._streams is not None:
            self._done = _copy_stream(self._device).record_event()

    def is_current(self, hosts: Sequence[torch.Tensor]) -> bool:
        """Whether these are the parameters that were sent, in that order, with the same values."""
        return (
            self._for_inference == torch.is_inference_mode_enabled()
            and list(map(id, hosts)) == list(map(id, self._hosts))
            and [values_of(host) for host in hosts] == self._values
        )

    def wait(self) -> None:
        """Have what is computed from now on wait for the copies."""
        if self._streams is not None:
            self._have_wait(self._streams.current_stream(self._device))

    def arrive(self, places: Iterable[tuple[nn.Module, str, torch.Tensor]]) -> list[Visitor]:
        """The weights in these places of modules, for what is computed from now on."""
        self.wait()
        return [Visitor(*place, copy) for place, copy in zip(places, self.copied)]

    def share(self) -> None:
        """Keep the copies for what this thread computes too, on whichever stream."""
        if self._streams is not None:
            self.wait()
            stream = self._streams.current_stream(self._device)
            for copy in self.copied if stream != self._taken_on else ():
                copy.record_stream(stream)

    def let_go(self) -> None:
        """Have what uses the copies' memory next wait for them, before they are dropped.

        Those that no one wants have to arrive too, before their memory is used for something else.
        """
        self._have_wait(self._taken_on)

    def _have_wait(self, stream: Any) -> None:
        if self._done is not None:
            stream.wait_event(self._done)


def values_of(tensor: torch.Tensor) -> tuple[int, int | None]:
    """A fingerprint of a live tensor: a change in place, or by `W.data = ...`, changes it."""
    return tensor.data_ptr(), None if tensor.is_inference() else tensor._version


class Visitor:
    """One weight on a device, for the parameter that lives on the host."""

    def __init__(
        self, module: nn.Module, name: str, host: torch.Tensor, copy: torch.Tensor
    ) -> None:
        self.host = host
        self._module, self._name = module, name
        with torch.enable_grad():  # as a parameter requires its gradient under no_grad too
            self.weight: torch.Tensor = _Visit.apply(host, copy)
        self._values = values_of(self.weight)

    def move_in(self) -> None:
        """Take the parameter's place in its module."""
        self._module._parameters[self._name] = self.weight  # type: ignore[assignment]

    def move_out(self) -> None:
        """Give the place back, unless a hook has filled it; what one has changed goes back too."""
        if self._module._parameters.get(self._name) is not self.weight:
            return
        self._module._parameters[self._name] = self.host  # type: ignore[assignment]
        if values_of(self.weight) != self._values:
            with torch.no_grad():
                self.host.copy_(self.weight)


class _Visit(torch.autograd.Function):
    """A parameter's copy, through which the gradient goes to the parameter."""

    @staticmethod
    def forward(host: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        return copy.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0].to(HOST), None


def keeping_on_host(visitors: Iterable[Visitor]) -> contextlib.AbstractContextManager[Any]:
    """Within it, autograd keeps host parameters instead of their copies on a device.

    Backward copies each to the device again when it reaches it. torch has one such pair of hooks
    in force at a time, so a user's own, such as `save_on_cpu`, see nothing of what is kept here.
    """
    if not torch.is_grad_enabled():
        return contextlib.nullcontext()
    # No copies in here: a graph also keeps the hooks that it was made with.
    hosts = {_storage(visitor.weight): (visitor.host, visitor.weight.dtype) for visitor in visitors}

    def keep(tensor: torch.Tensor) -> _Kept | _KeptWeight:
        host, dtype = hosts.get(_storage(tensor), (None, None))
        if host is None or tensor.dtype != dtype:
            return _Kept(tensor.detach(), tensor._version)
        part = (tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
        return _KeptWeight(host, host._version, tensor.device, part)

    return torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept.restore())


def _storage(tensor: torch.Tensor) -> int:
    """An identifier of a tensor's live storage, which views share."""
    return tensor.untyped_storage()._cdata


@dataclass(frozen=True)
class _Kept:
    """A tensor that is none of the weights, or the host's parameter of one."""

    tensor: torch.Tensor
    version: int

    def restore(self) -> torch.Tensor:
        """The tensor. With hooks, torch leaves it to them to refuse one that was changed."""
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: {tuple(self.tensor.shape)} on {self.tensor.device} is at "
                f"version {self.tensor._version}; expected version {self.version} instead"
            )
        return self.tensor


@dataclass(frozen=True)
class _KeptWeight(_Kept):
    """A weight, or a view of one, that lives on the host."""

    device: torch.device
    part: tuple[tuple[int, ...], tuple[int, ...], int]
    """Shape, strides and offset, within a copy."""

    @torch.no_grad()
    def restore(self) -> torch.Tensor:
        """A copy on the device, if the weight has not been changed."""
        host = super().restore()
        copy = torch.empty_like(host, device=self.device, requires_grad=False)
        # Not non_blocking: the weight may be changed as soon as backward has returned.
        return copy.copy_(host).as_strided(*self.part)

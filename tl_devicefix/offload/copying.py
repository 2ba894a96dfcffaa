"""Copies from host memory to a device that run beside what the device computes.

They are on a stream of their own, where a device has streams; elsewhere a copy is done at once.
Their memory is taken on the stream that computes, where what was there before has left it. So a
copy starts as soon as what was computed with that memory is done, and no more memory is taken
however far the program runs ahead of the device.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch


def copies_beside_computing(device: torch.device) -> bool:
    """Whether the device copies while it computes, which needs pinned memory."""
    return module_with_streams(device) is not None


class Copies:
    """Some copies to a device that are started together, and can be waited for.

    Args:
        device: where to.

    >>> with Copies(torch.device("cpu")) as copies:
    ...     copy = copies.start(torch.ones(2))
    >>> copies.wait()
    >>> copy
    tensor([1., 1.])
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = module_with_streams(device)
        self._done: Any = None
        # The stream on which memory is taken, and for which it is free again when it is let go.
        self._taken_on: Any = self._streams.current_stream(device) if self._streams else None

    def __enter__(self) -> Copies:
        return self

    @torch.no_grad()
    def start(self, host: torch.Tensor) -> torch.Tensor:
        """Start to copy a tensor; the copy is laid out as the tensor is."""
        there = torch.empty_like(host, device=self._device, requires_grad=False)
        if self._streams is not None:
            # The memory is free when what is queued by now has been computed, by any thread: one
            # may have queued something, and freed what it used, since the copy before.
            _copy_stream(self._device).wait_stream(self._streams.current_stream(self._device))
        with self._on_copy_stream():
            there.copy_(host, non_blocking=True)
        return there

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._streams is not None:
            self._done = _copy_stream(self._device).record_event()
            if error is not None:
                self.wait()  # the memory of those that were started is about to be given back

    def wait(self) -> None:
        """Have what is computed from now on wait for the copies."""
        if self._done is not None:
            self._streams.current_stream(self._device).wait_event(self._done)

    def let_go(self) -> None:
        """Have what uses the copies' memory next wait for the copies, which nobody may need."""
        if self._done is not None:
            self._taken_on.wait_event(self._done)

    def share(self, there: Iterable[torch.Tensor]) -> None:
        """Have what this thread computes use copies that another thread has waited for.

        Args:
            there: the copies, whose memory is kept until that has been computed.
        """
        if self._streams is not None:
            self.wait()
            for each in there:
                each.record_stream(self._streams.current_stream(self._device))

    def _on_copy_stream(self) -> contextlib.AbstractContextManager[Any]:
        if self._streams is None:
            return contextlib.nullcontext()
        return self._streams.stream(_copy_stream(self._device))


def wait_until_copied(device: torch.device) -> None:
    """Return when all copies to a device that were started have read the host's memory.

    Until then, what the host writes there may be what is copied.
    """
    if module_with_streams(device) is not None:
        _copy_stream(device).synchronize()


def module_with_streams(device: torch.device) -> Any:
    """torch's module of the device, if that has streams."""
    module = torch.get_device_module(device.type)
    return module if hasattr(module, "Stream") and device.type != "cpu" else None


@functools.cache
def _copy_stream(device: torch.device) -> Any:
    return module_with_streams(device).Stream(device)

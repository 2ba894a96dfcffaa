"""Runs in flight: each holds the device where it computes, and waits for the next one's.

Each run is a thread. Where its residual stream leaves for another device, it releases the device
that it holds, waits until the tensors have arrived, and queues for the other device. Runs 0, 1, 2
and 3 over two devices:

    cuda:0   blocks 0-3   | 0 | 1 | 2 | 3 |
    cuda:1   blocks 4-7       | 0 | 1 | 2 | 3 |
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import NamedTuple, TypeVar

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary
from transformer_lens.hook_points import HookPoint

from tl_devicefix.monkeypatch.patch import patches
from tl_devicefix.offload.prefetch import drop_prefetched
from tl_devicefix.placement.devices import module_with_streams
from tl_devicefix.placement.in_use import setting
from tl_devicefix.types import Model

Item = TypeVar("Item")
T = TypeVar("T")


class Abandoned(BaseException):
    """Cancels a run. Derives from BaseException because user code may catch Exception."""


class DeviceQueue:
    """Gives each device to one run of a `pipeline_map` at a time: the oldest that asks for it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # its lock guards the others
        self._holders: dict[torch.device, Run] = {}
        self._asking: dict[torch.device, list[Run]] = defaultdict(list)
        self._requested = -1  # the number of the run whose result the caller waits for
        self._is_over = False

    def request(self, number: int) -> None:
        """Say that the caller waits for a run's result, and has fetched all earlier ones."""
        with self._changed:
            self._requested = number
            self._changed.notify_all()

    def end(self) -> None:
        """Cancel all runs that have not finished."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def check(self) -> None:
        """Cancel the run that calls this, if nobody waits for results any more."""
        # Without the lock, because each torch function of a run comes here.
        if self._is_over:
            raise Abandoned

    def acquire(self, run: Run, device: torch.device) -> None:
        """Wait until a run, which holds no device, holds this one."""
        with self._changed:
            self._asking[device].append(run)
            self._grant(device)
            try:
                while self._holders.get(device) is not run:
                    self.check()
                    self._changed.wait()
                self.check()
            except BaseException:
                if run in self._asking[device]:
                    self._asking[device].remove(run)
                self.release(run, device)
                raise

    def release(self, run: Run, device: torch.device) -> None:
        """Let the next run have a device."""
        with self._changed:
            if self._holders.get(device) is run:
                del self._holders[device]
            self._grant(device)

    def _grant(self, device: torch.device) -> None:
        # The oldest first, because its result is fetched first, and only then may a new run begin.
        asking = self._asking[device]
        if asking and device not in self._holders:
            oldest = min(asking, key=lambda run: run.number)
            asking.remove(oldest)
            self._holders[device] = oldest
            self._changed.notify_all()

    def wait_until_requested(self, number: int) -> None:
        """Wait until the caller has fetched all results before a run's, and waits for its own."""
        with self._changed:
            while self._requested < number:
                self.check()
                self._changed.wait()


class Streams(dict[torch.device, torch.Stream]):
    """The streams of one view, a device each, on which tensors go from device to device."""

    def __missing__(self, device: torch.device) -> torch.Stream:
        stream = self[device] = torch.get_device_module(device.type).Stream(device)
        return stream


class Run:
    """One run of a `pipeline_map`, in the thread that runs it.

    Attributes:
        device: the device that it holds, if any.
    """

    def __init__(self, number: int, queue: DeviceQueue, streams: Streams) -> None:
        self.number = number
        self.queue = queue
        self._streams = streams
        self.device: torch.device | None = None
        self._thread = threading.get_ident()  # because autograd may call hooks in another
        # Tensors on the way to the next device, each with its source, which is read until then.
        self._sent: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        # The versions of tensors whose copies the host has waited for.
        self._computed = WeakIdKeyDictionary()

    @contextlib.contextmanager
    def moving_to(self, device: torch.device) -> Iterator[None]:
        """Within it, `send` copies tensors to a device; after it, the run holds that device."""
        if device == self.device:
            yield
            return
        self.queue.check()
        sent: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._sent = sent
        try:
            yield
        finally:
            self._sent = None
            self.release()
            if sent:
                # The host waits, also after an error, because somebody may have kept what arrives.
                self._streams[device].synchronize()
                computing = torch.get_device_module(device.type).current_stream(device)
                # The allocator took the copies on our stream, and would free them in its order.
                while sent:  # without names, which would hold tensors while the run waits
                    sent.pop()[1].record_stream(computing)
        self.acquire(device)

    def acquire(self, device: torch.device) -> None:
        """Wait for a device, and hold it."""
        self.queue.acquire(self, device)
        self.device = device

    def send(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Copy a tensor to a device, within `moving_to`; at once where there are no streams."""
        module = module_with_streams(device)
        if self._sent is None or module is None:
            return tensor.to(device)
        with contextlib.ExitStack() as stack:
            # On streams of the view, because those that compute have kernels of later runs queued.
            if tensor.device.type == device.type:
                source = self._streams[tensor.device]
                if not self._is_computed(tensor):
                    source.wait_stream(module.current_stream(tensor.device))
                stack.enter_context(module.stream(source))
            stack.enter_context(module.stream(self._streams[device]))
            copy = tensor.to(device)
        self._sent.append((tensor, copy))
        return copy

    def _is_computed(self, tensor: torch.Tensor) -> bool:
        """Return True if the host has waited for this tensor before; from now on it has."""
        # Because a mask goes to each device, and would wait at each for all kernels that other runs
        # have queued at home meanwhile.
        if tensor.is_inference():  # because torch does not count their changes
            return False
        is_computed = self._computed.get(tensor) == tensor._version
        self._computed[tensor] = tensor._version
        return is_computed

    def release(self) -> None:
        """Release the device that the run holds, if any, and what is prefetched there."""
        device, self.device = self.device, None
        if device is not None:
            # Because the next run prefetches there too: memory is for two blocks.
            drop_prefetched(device)
            self.queue.release(self, device)

    @contextlib.contextmanager
    def preserve_device(self) -> Iterator[None]:
        """After it, the run holds the device that it held before, or none."""
        before = self.device
        try:
            yield
        finally:
            if before != self.device:
                self.release()
                if before is not None:
                    self.acquire(before)

    def wait_for_earlier(self) -> None:
        """Block until all earlier results have been fetched, as in a sequential loop."""
        if threading.get_ident() != self._thread:
            raise RuntimeError(
                "a backward hook may not draw random numbers or call backward() in a run in "
                "flight, because autograd calls it in a thread that all runs share: do so before "
                "the backward, or pass max_in_flight=1"
            )
        # Without the device, because earlier runs need it before their results can be fetched.
        device = self.device
        self.release()
        self.queue.wait_until_requested(self.number)
        if device is not None:
            self.acquire(device)


class _Current(NamedTuple):
    """A thread's run in flight, and the models and hook points of which a run was given a view."""

    run: Run | None = None
    refused: frozenset[nn.Module] = frozenset()


_OUTSIDE = _Current()
_current: ContextVar[_Current] = ContextVar("run", default=_OUTSIDE)


def current_run() -> Run | None:
    """Return this thread's run in flight; None outside of one."""
    return _current.get().run


@contextlib.contextmanager
def running(run: Run) -> Iterator[None]:
    """Within it, this thread is a run in flight."""
    with setting(_current, _current.get()._replace(run=run)):
        try:
            yield
        finally:
            run.release()


def with_view_of(model: nn.Module, run: Callable[[Model, Item], T]) -> Callable[[Model, Item], T]:
    """Return a run that is called with a view of a model, and within which the model is refused."""
    refuse_in_run(model)
    points = (module for module in model.modules() if isinstance(module, HookPoint))
    refused = _current.get().refused.union((model,), points)

    def refusing(view: Model, item: Item) -> T:
        with setting(_current, _current.get()._replace(refused=refused)):
            return run(view, item)

    return refusing


def refuse_in_run(module: nn.Module) -> None:
    """Refuse a model, or a hook point, in a run that has a view of it, with hooks of its own."""
    if module in _current.get().refused:
        raise RuntimeError(
            "a run was given a view of this model, with hooks of its own, and may not run or hook "
            "the model itself: use the first argument of `run` (a hook of a sweep has none: "
            "compute what it needs before)"
        )


def moving_to(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Within it, a run in flight sends tensors to a device; after it, the run holds the device."""
    run = current_run()
    return contextlib.nullcontext() if run is None else run.moving_to(device)


# Reentrant, because `to_str_tokens` calls `to_tokens`.
_reads_text = threading.RLock()
_ONE_AT_A_TIME = "runs in flight call the tokenizer one at a time"


@patches("HookedTransformer", "to_tokens", "to_str_tokens", takes="self input", why=_ONE_AT_A_TIME)
@patches("HookedTransformer", "to_string", takes="self tokens", why=_ONE_AT_A_TIME)
@patches("TransformerBridge", "to_tokens", "to_str_tokens", takes="self input", why=_ONE_AT_A_TIME)
def reading(original: Callable[..., T], self: Model, *args: object, **kwargs: object) -> T:
    """Wrap a method that calls the tokenizer."""
    # One at a time, because a call sets the padding side on the tokenizer, and reads it again.
    with contextlib.nullcontext() if current_run() is None else _reads_text:
        return original(self, *args, **kwargs)


def take_own_tokenizer(view: Model) -> None:
    """Give a run's view a copy of the tokenizer, whose padding side a method is about to set."""
    # A shallow copy, because the Rust tokenizer behind it is told the side at each call.
    if current_run() is not None and view.tokenizer is not None:
        view.tokenizer = copy.copy(view.tokenizer)

"""Runs in flight: a run holds the device that it computes on, and queues for the next one.

Each run has a thread. (Most sweeps have none: see `RunAhead`.) When its residual stream moves to
another device, the run

1. releases its device,
2. waits until the copies have arrived, and
3. queues for the other device.

Runs 0, 1, 2 and 3 on two devices:

    cuda:0   blocks 0-3   | 0 | 1 | 2 | 3 |
    cuda:1   blocks 4-7       | 0 | 1 | 2 | 3 |
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import NamedTuple, TypeVar

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary
from transformer_lens.hook_points import HookPoint, LensHandle

from tl_devicefix.monkeypatch.patch import patches
from tl_devicefix.offload import drop_prefetched
from tl_devicefix.placement.devices import module_with_streams
from tl_devicefix.placement.elsewhere import is_elsewhere
from tl_devicefix.placement.in_use import setting
from tl_devicefix.types import Model

Item = TypeVar("Item")
T = TypeVar("T")


MAX_WAIT = 1.0
"""The most seconds that a run waits for `DeviceQueue.python_turn`."""


class Abandoned(BaseException):
    """Cancels a run. Derives from BaseException: user code may catch Exception."""


class DeviceQueue:
    """Gives each device to one run at a time: the waiting run with the lowest number.

    Attributes:
        python_turn: the lock that a run holds while it holds a device of this host. torch releases
            the GIL at each operation. Runs whose threads switch there take twice as long as runs
            that switch only at the end of a device's blocks.
    """

    def __init__(self) -> None:
        self.python_turn = threading.Lock()
        # The condition's lock guards the attributes below; only `check` does without it.
        self._changed = threading.Condition()
        self._held: set[torch.device] = set()
        self._waiting: dict[torch.device, list[int]] = defaultdict(list)  # the runs' numbers
        self._is_over = False

    def end(self) -> None:
        """Have each unfinished run raise `Abandoned` at its next `check`."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def check(self) -> None:
        """Raise `Abandoned` in the run that calls this, if `end` was called."""
        # Each torch function of a run's own code calls this, so it takes no lock.
        if self._is_over:
            raise Abandoned

    def acquire(self, number: int, device: torch.device) -> None:
        """Block until the run of this number holds the device; it must hold none before."""
        with self._changed:
            waiting = self._waiting[device]
            waiting.append(number)
            # The oldest goes first: results are fetched in order, and a run starts after each.
            while not self._is_over and (device in self._held or number > min(waiting)):
                self._changed.wait()
            waiting.remove(number)
            self.check()
            self._held.add(device)

    def release(self, device: torch.device) -> None:
        """Release a device for the next run that waits."""
        with self._changed:
            self._held.remove(device)
            self._changed.notify_all()


class Streams(dict[torch.device, torch.Stream]):
    """Streams to copy on: one for each device, created on first use."""

    def __missing__(self, device: torch.device) -> torch.Stream:
        stream = self[device] = torch.get_device_module(device.type).Stream(device)
        return stream


class Run:
    """One run of a `pipeline_map`, in the thread that runs it.

    Attributes:
        device: the device that the run holds, if any.
    """

    def __init__(self, number: int, queue: DeviceQueue, streams: Streams) -> None:
        self.number = number
        self.queue = queue
        self._streams = streams
        self.device: torch.device | None = None
        self._has_turn = False
        # (source, copy) pairs. A source has to live until its copy has arrived.
        self._sent: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        # Tensor -> its version when it was last sent. The host has waited for that copy, so the
        # device has computed that version.
        self._versions_sent = WeakIdKeyDictionary()

    @contextlib.contextmanager
    def moving_to(self, device: torch.device) -> Iterator[None]:
        """Make `send` copy to a device within the `with` block; then hold that device."""
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
                # Do this after an error too: the user may have kept a copy that has not arrived.
                self._streams[device].synchronize()
                computing = torch.get_device_module(device.type).current_stream(device)
                # The copies were allocated on our stream, so the allocator would otherwise reuse
                # their memory while kernels on the computing stream still read it.
                while sent:  # pop: a loop variable would keep a tensor alive during `acquire`
                    sent.pop()[1].record_stream(computing)
        self.acquire(device)

    def acquire(self, device: torch.device) -> None:
        """Wait for a device, and hold it."""
        self.queue.acquire(self.number, device)
        self.device = device
        # A run on a remote device only waits for an answer, and needs no turn. A local run goes
        # on without it after MAX_WAIT: the run that has the turn may be waiting too, in a hook.
        if not is_elsewhere(device):
            self._has_turn = self.queue.python_turn.acquire(timeout=MAX_WAIT)

    def send(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Copy a tensor to a device: asynchronously in `moving_to`, if the device has streams."""
        module = module_with_streams(device)
        if self._sent is None or module is None:
            return tensor.to(device)
        with contextlib.ExitStack() as stack:
            # Copy on this run's own streams: on the computing streams, the copy would wait for
            # kernels that other runs have queued.
            if tensor.device.type == device.type:
                source = self._streams[tensor.device]
                if not self._mark_sent(tensor):
                    source.wait_stream(module.current_stream(tensor.device))
                stack.enter_context(module.stream(source))
            stack.enter_context(module.stream(self._streams[device]))
            copy = tensor.to(device)
        self._sent.append((tensor, copy))
        return copy

    def _mark_sent(self, tensor: torch.Tensor) -> bool:
        """Record that this version of a tensor is sent; return True if that was recorded before."""
        # A mask is sent to every device. Without this record, each copy would wait for all kernels
        # that other runs have queued on the first device.
        if tensor.is_inference():  # has no version counter
            return False
        was_sent = self._versions_sent.get(tensor) == tensor._version
        self._versions_sent[tensor] = tensor._version
        return was_sent

    def release(self) -> None:
        """Release the device that the run holds, if any, and drop what was prefetched there."""
        device, self.device = self.device, None
        if self._has_turn:
            self._has_turn = False
            self.queue.python_turn.release()
        if device is not None:
            # The next run prefetches there too, and the device has memory for two blocks only.
            drop_prefetched(device)
            self.queue.release(device)

    @contextlib.contextmanager
    def preserve_device(self) -> Iterator[None]:
        """On leaving a `with` block, hold the same device as on entering it, or none."""
        before = self.device
        try:
            yield
        finally:
            if before != self.device:
                self.release()
                if before is not None:
                    self.acquire(before)


class RunAhead:
    """A run that the host launches without waiting for it: devices compute it later, in order.

    The residual stream returns to the first device for the final norm. If that device's computing
    stream waited for the copy, the next run could not begin. So each run ends on its own stream:

        home, computing stream    run 0   run 1   run 2   run 3
        cuda:1                            run 0   run 1   run 2   run 3
        home, streams of runs                     0       1       2       3

    `last` are the modules that run after the blocks, on the first device.
    """

    def __init__(self, home: torch.device, last: frozenset[nn.Module]) -> None:
        self._home, self._last_modules = home, last
        self._points = [p for m in last for p in m.modules() if isinstance(p, HookPoint)]
        self._module = torch.get_device_module(home.type)
        self._stream: torch.Stream = self._module.Stream(home)
        self._stream_pairs = defaultdict[tuple[torch.device, torch.device], Streams](Streams)
        self._computing: torch.Stream | None = None  # of home, once the run has returned there
        self._end = contextlib.ExitStack()

    def __enter__(self) -> None:
        self._computing = None

    def __exit__(self, *_: object) -> None:
        self._end.close()

    def begin(self, module: nn.Module, residual: torch.Tensor) -> None:
        """Call `return_home` if one of the last modules gets its input from another device.

        If those modules have hooks, the run stays on the computing stream: a hook may free tensors
        of that stream, whose memory would be reused too early.
        """
        comes_home = module in self._last_modules and residual.device != self._home
        if comes_home and not any(point._forward_hooks for point in self._points):
            self.return_home()

    def return_home(self) -> None:
        """Compute on the run's own stream of the first device from here on."""
        if self._computing is None:
            self._computing = self._module.current_stream(self._home)
            self._stream.wait_stream(self._computing)
            self._end.enter_context(self._module.stream(self._stream))

    def join(self, results: Iterable[torch.Tensor] = ()) -> None:
        """Make the caller's next work on the first device wait for this run."""
        if self._computing is None:
            return
        results = list(results)
        # The result may be fetched on another stream than it was launched from.
        for stream in {self._computing, self._module.current_stream(self._home)}:
            stream.wait_stream(self._stream)
            for tensor in results:
                tensor.record_stream(stream)

    def send(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Copy a tensor to a device on the run's own streams."""
        if tensor.device.type != device.type:
            return tensor.to(device)
        # Each pair of devices has its own two streams: on shared ones, a mask from the first device
        # would wait for the residual stream that is on its way to the same device.
        pair = self._stream_pairs[tensor.device, device]
        source, target = pair[tensor.device], pair[device]
        computing, before = map(self._module.current_stream, (device, tensor.device))
        source.wait_stream(before)
        with self._module.stream(source), self._module.stream(target):
            copy = tensor.to(device)
        before.wait_stream(source)  # the tensor may be edited or freed afterwards
        # The copy was allocated on `target`: keep its memory until `computing` has read it.
        copy.record_stream(computing)
        computing.wait_stream(target)
        return copy


class _Context(NamedTuple):
    """A thread's run, what the run may not use, and the hook points that it has hooked."""

    run: Run | None = None  # the run in flight; None in runs that do not overlap
    ahead: RunAhead | None = None  # the run that this thread launches ahead; None in its hooks
    refused: frozenset[nn.Module] = frozenset()  # models and hook points of which it has a view
    # Those hooked within `removing_hooks`, each with the handles that it had before
    hooked: dict[HookPoint, tuple[LensHandle, ...]] | None = None


_OUTSIDE = _Context()
_current: ContextVar[_Context] = ContextVar("run", default=_OUTSIDE)


def current_run() -> Run | None:
    """Return this thread's run in flight; None outside of one."""
    return _current.get().run


def run_ahead() -> RunAhead | None:
    """Return the run that this thread launches ahead; None outside of one, and in its hooks."""
    return _current.get().ahead


def launching(run: RunAhead | None) -> contextlib.AbstractContextManager[None]:
    """Make `run` the one that this thread launches ahead within a `with` block."""
    return setting(_current, _current.get()._replace(ahead=run))


def copy_to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy of a tensor on another device, on the streams of this thread's run, if any."""
    context = _current.get()
    run = context.run or context.ahead
    return tensor.to(device) if run is None else run.send(tensor, device)


@contextlib.contextmanager
def running(run: Run) -> Iterator[None]:
    """Make this thread a run in flight within the `with` block."""
    with setting(_current, _current.get()._replace(run=run)):
        try:
            yield
        finally:
            run.release()


def with_view_of(model: nn.Module, run: Callable[[Model, Item], T]) -> Callable[[Model, Item], T]:
    """Wrap `run`, which gets a view of `model`, so that it raises if it uses `model` itself."""
    refuse_in_run(model)
    points = (module for module in model.modules() if isinstance(module, HookPoint))
    refused = _current.get().refused.union((model,), points)

    def with_view(view: Model, item: Item) -> T:
        with setting(_current, _current.get()._replace(refused=refused)):
            return run(view, item)

    return with_view


def refuse_in_run(module: nn.Module) -> None:
    """Raise if this thread's run was given a view in place of this model or hook point."""
    if module in _current.get().refused:
        raise RuntimeError(
            "a run was given a view of this model, with hooks of its own, and may not run or hook "
            "the model itself: use the first argument of `run` (a sweep's hook gets no view: "
            "compute what it needs before the sweep)"
        )


_n_hooked = 0


def n_hooked_outside_runs() -> int:
    """Return how often a hook point was given a hook outside of runs, in any thread."""
    return _n_hooked


def note_hooked(point: HookPoint) -> None:
    """Record that a hook point gets a hook; raise if the run was given a view of it."""
    global _n_hooked
    refuse_in_run(point)
    hooked = _current.get().hooked
    if hooked is not None:
        hooked.setdefault(point, (*point.fwd_hooks, *point.bwd_hooks))
    elif current_run() is None:
        _n_hooked += 1


@contextlib.contextmanager
def removing_hooks() -> Iterator[None]:
    """On leaving a `with` block, remove the hooks that hook points got within it."""
    hooked: dict[HookPoint, tuple[LensHandle, ...]] = {}
    with setting(_current, _current.get()._replace(hooked=hooked)):
        try:
            yield
        finally:
            for point, before in hooked.items():
                kept = set(map(id, before))
                for handles in (point.fwd_hooks, point.bwd_hooks):
                    for handle in [each for each in handles if id(each) not in kept]:
                        handle.hook.remove()
                        handles.remove(handle)


def moving_to(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Return `Run.moving_to` of this thread's run; outside of runs, an empty context."""
    run = current_run()
    return contextlib.nullcontext() if run is None else run.moving_to(device)


encoding = threading.RLock()
"""Held while a text is encoded: a call sets the padding of the Rust tokenizer, which a model and
its views share. It is reentrant: `to_str_tokens` calls `to_tokens`."""

_ONE_AT_A_TIME = "texts are encoded one at a time, by runs in flight and by other code"


@patches("HookedTransformer", "to_tokens", "to_str_tokens", takes="self input", why=_ONE_AT_A_TIME)
@patches("TransformerBridge", "to_tokens", "to_str_tokens", takes="self input", why=_ONE_AT_A_TIME)
def encode_in_turn(original: Callable[..., T], *args: object, **kwargs: object) -> T:
    """Wrap a method that encodes texts, and sets the padding side of the model's tokenizer."""
    with encoding:
        return original(*args, **kwargs)

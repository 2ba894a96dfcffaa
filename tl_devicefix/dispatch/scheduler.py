"""Runs in flight: which of them gives work to which device, and how one goes on to the next.

Each run is a thread, and holds the turn of the device where it computes. Where its residual stream
leaves for another device, it gives the turn back, waits until what it takes along has arrived, and
takes the other's turn. Of runs 0, 1, 2, 3 over two devices:

    cuda:0   blocks 0-3   | 0 | 1 | 2 | 3 |
    cuda:1   blocks 4-7       | 0 | 1 | 2 | 3 |

So a device gets the blocks of one run after those of another, and the first is done in half the
time that both together would take. Before an offloaded block, a run offers its turn to those that
need what is on the device, so that a block visits for all of them:

    cuda:0   block 0, offloaded   | 0 | 1 | 2 |
             block 1, offloaded               | 0 | 1 | 2 |
             copied                | block 1  |  block 2  |
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary
from transformer_lens.hook_points import HookPoint

from tl_devicefix.monkeypatch.patch import patches
from tl_devicefix.offload.copying import module_with_streams
from tl_devicefix.offload.visiting import Visits, sharing_visits, visiting_weights
from tl_devicefix.placement.in_use import setting


class Abandoned(BaseException):
    """Ends a run that nobody waits for any more. No Exception, as a run may catch these."""


class Turns:
    """The turns of the devices, among the runs of one `pipeline_map`.

    Of the runs that ask for a device, those go first that need the offloaded block which was last
    used there, or none; then those that need another one that is there; then the oldest.
    """

    def __init__(self) -> None:
        self.visits = Visits()
        self._changed = threading.Condition()
        self._holders: dict[torch.device, Run] = {}
        self._asking: dict[torch.device, list[tuple[Run, object | None]]] = defaultdict(list)
        self._awaited = -1
        self._is_over = False

    def want(self, number: int) -> None:
        """Say that the result of a run is waited for, as those before it have been fetched."""
        with self._changed:
            self._awaited = number
            self._changed.notify_all()

    def end(self) -> None:
        """Have every run end that has not finished."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def check(self) -> None:
        """Go on, unless nobody waits any more."""
        if self._is_over:
            raise Abandoned

    def take(self, run: Run, device: torch.device, weights: object | None = None) -> None:
        """Wait until it is a run's turn on a device. Who has the turn offers it to others.

        `weights` stands for those of the offloaded block that it comes to.
        """
        asking = run, weights
        with self._changed:
            self._asking[device].append(asking)
            self._free(device, run)
            try:
                while self._holders.get(device) is not run:
                    self.check()
                    self._changed.wait()
                self.check()
            except BaseException:
                if asking in self._asking[device]:
                    self._asking[device].remove(asking)
                self._free(device, run)
                raise

    def give_back(self, run: Run, device: torch.device) -> None:
        """Let the next run have a device."""
        with self._changed:
            self._free(device, run)

    def _free(self, device: torch.device, run: Run) -> None:
        if self._holders.get(device) is run:
            del self._holders[device]
        self._grant(device)

    def _grant(self, device: torch.device) -> None:
        """Give a free device's turn to the first that asks for it."""
        asking = self._asking[device]
        if device in self._holders or not asking:
            return
        first = min(
            asking, key=lambda request: (self.visits.rank(device, request[1]), request[0].number)
        )
        asking.remove(first)
        self._holders[device] = first[0]
        self._changed.notify_all()

    def wait_until_wanted(self, number: int) -> None:
        """Wait until all results before a run's have been fetched, and its own is waited for."""
        with self._changed:
            while self._awaited < number:
                self.check()
                self._changed.wait()


class Streams(dict[torch.device, Any]):
    """The streams of one view, a device each, on which tensors go from device to device."""

    def __missing__(self, device: torch.device) -> Any:
        stream = self[device] = torch.get_device_module(device.type).Stream(device)
        return stream


class Run:
    """One run of a `pipeline_map`, in the thread that runs it.

    Attributes:
        at: the device whose turn it holds, if any.
    """

    def __init__(self, number: int, turns: Turns, streams: Streams) -> None:
        self.number = number
        self.turns = turns
        self._streams = streams
        self.at: torch.device | None = None
        self._thread = threading.get_ident()
        # What is on the way to the next device: each with its source, which is needed until then.
        self._sent: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        # Tensors that were computed when the host has last waited for a copy of theirs.
        self._computed = WeakIdKeyDictionary()

    @contextlib.contextmanager
    def going_to(self, device: torch.device, weights: object | None = None) -> Iterator[None]:
        """Within it, `move` sends tensors to a device; at its end, they and the turn are there."""
        if device == self.at:
            yield
            if weights is not None:
                self._take(device, weights)
            return
        self.turns.check()
        sent: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._sent = sent
        try:
            yield
        finally:
            self._sent = None
            self.rest()
            if sent:  # also after an error, as someone may have kept what arrives
                self._streams[device].synchronize()
                computing = torch.get_device_module(device.type).current_stream(device)
                while sent:  # by no names, which would hold tensors until it is this run's turn
                    sent.pop()[1].record_stream(computing)
        self._take(device, weights)

    def _take(self, device: torch.device, weights: object | None = None) -> None:
        self.at = None  # if it fails
        self.turns.take(self, device, weights)
        self.at = device

    def send(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Copy a tensor to a device, within `going_to`; at once where there are no streams."""
        module = module_with_streams(device)
        if self._sent is None or module is None:
            return tensor.to(device)
        with contextlib.ExitStack() as stack:
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
        """Whether the host has waited for this tensor before; it will have, from now on.

        A mask goes to each device: without this, it would wait at home for all that other runs
        have given home to do meanwhile.
        """
        if tensor.is_inference():  # whose changes are not counted
            return False
        is_computed = self._computed.get(tensor) == tensor._version
        self._computed[tensor] = tensor._version
        return is_computed

    def rest(self) -> None:
        """Give the turn back, if it holds one."""
        at, self.at = self.at, None
        if at is not None:
            self.turns.give_back(self, at)

    @contextlib.contextmanager
    def coming_back(self) -> Iterator[None]:
        """After it, the run holds the turn that it held before: of a device, or of none."""
        before = self.at
        try:
            yield
        finally:
            if before != self.at:
                self.rest()
                if before is not None:
                    self._take(before)

    def wait_for_earlier(self) -> None:
        """Go on when a loop would have come here; other runs may have this one's turn meanwhile."""
        if threading.get_ident() != self._thread:
            raise RuntimeError(
                "a backward hook may not draw random numbers or call backward() in a run in "
                "flight, because autograd calls it in a thread that all runs share: do so before "
                "the backward, or pass max_in_flight=1"
            )
        at = self.at
        self.rest()
        self.turns.wait_until_wanted(self.number)
        if at is not None:
            self._take(at)


_run: ContextVar[Run | None] = ContextVar("run", default=None)


def current_run() -> Run | None:
    """This thread's run in flight; None outside of one."""
    return _run.get()


@contextlib.contextmanager
def running(run: Run) -> Iterator[None]:
    """Within it, this thread is a run in flight."""
    with setting(_run, run):
        try:
            with sharing_visits(run.turns.visits):
                yield
        finally:
            run.rest()


_has_views_of: ContextVar[frozenset[nn.Module]] = ContextVar("has_views_of", default=frozenset())
"""The models of which this thread's run was given a view, and their hook points."""


def with_view_of(model: nn.Module, run: Callable[..., Any]) -> Callable[..., Any]:
    """A run as it is called with a view of a model: within it, the model itself is refused."""
    refuse_in_run(model)
    points = (module for module in model.modules() if isinstance(module, HookPoint))
    refused = _has_views_of.get().union((model,), points)

    def refusing(view: Any, item: Any) -> Any:
        with setting(_has_views_of, refused):
            return run(view, item)

    return refusing


def refuse_in_run(module: nn.Module) -> None:
    """Refuse a model, or a hook point, where a run has a view of it, whose hooks are others."""
    if module in _has_views_of.get():
        raise RuntimeError(
            "a run was given a view of this model, with hooks of its own, and may not run or hook "
            "the model itself: use the first argument of `run` (a hook of a sweep has none: "
            "compute what it needs before)"
        )


_STAYS = contextlib.nullcontext()


def going_to(
    device: torch.device, module: nn.Module | None = None
) -> contextlib.AbstractContextManager[None]:
    """Within it, a run in flight goes on to a device, and takes along what is moved there."""
    run = _run.get()
    if run is None:
        return _STAYS
    return run.going_to(device, None if module is None else visiting_weights(module))


_reads_text = threading.RLock()


_ONE_AT_A_TIME = "runs in flight call the tokenizer one at a time"


@patches("HookedTransformer", "to_tokens", "to_str_tokens", takes="self input", why=_ONE_AT_A_TIME)
@patches("HookedTransformer", "to_string", takes="self tokens", why=_ONE_AT_A_TIME)
@patches("TransformerBridge", "to_tokens", "to_str_tokens", takes="self input", why=_ONE_AT_A_TIME)
def reading(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """A method that calls the tokenizer, which keeps how to pad between calls."""
    with contextlib.nullcontext() if _run.get() is None else _reads_text:
        return original(self, *args, **kwargs)


def take_own_tokenizer(model: Any) -> None:
    """Have a run's view change a copy's padding side: other runs read the tokenizer's meanwhile.

    What is behind the copy is shared, and is told the side at each call.
    """
    if _run.get() is not None and model.tokenizer is not None:
        model.tokenizer = copy.copy(model.tokenizer)

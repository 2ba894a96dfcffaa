"""`pipeline_map`: many runs of one model at once, each device busy with another run.

Two devices, four runs; a run waits at a device until the run before it has left:

    cuda:0   run 0   run 1   run 2   run 3
    cuda:1           run 0   run 1   run 2   run 3
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from inspect import signature
from operator import length_hint
from typing import TypeVar

import torch
import transformers.utils.logging as hf_logging
from tqdm import tqdm

from tl_devicefix.adapters import adapter_of
from tl_devicefix.dispatch.naming import WRAPPED, join_path
from tl_devicefix.dispatch.scheduler import DeviceQueue, Run, Streams, running, with_view_of
from tl_devicefix.dispatch.views import View
from tl_devicefix.misspelt import check_iterable, refuse_unknown, shown
from tl_devicefix.offload.copying import fingerprint
from tl_devicefix.pipelining.in_order import InOrder, seeding_in_order
from tl_devicefix.placement.placement import placement_of
from tl_devicefix.placement.remote_tensor import RemoteTensor
from tl_devicefix.placement.workers import CallersState, threads
from tl_devicefix.tracebacks import note
from tl_devicefix.types import Model

Item = TypeVar("Item")
Result = TypeVar("Result")


def pipeline_map(
    model: Model,
    run: Callable[[Model, Item], Result],
    items: Iterable[Item],
    max_in_flight: int | None = None,
    *,
    progress: bool = False,
) -> Generator[Result, None, None]:
    """Yield ``run(model, item)`` for each item, in order, with several runs under way at a time.

    A loop uses one of a model's n devices at a time. Here, while one run is on the second device,
    the next one is on the first. You get the results of ``[run(model, item) for item in items]``,
    bit for bit.

    Each run has a thread, and a view of the model: the same class, parameters, config and
    placement, and hooks of its own. Hooks that a run adds, and attributes that it sets on modules,
    are gone when it ends. The config is shared. A run may read `model` itself, but neither run nor
    hook it. Between results you may run it; hooks that you leave on it are refused, because runs
    keep the hooks of the start.

    Operations on shared state run in the order of your items. A run that draws torch's random
    numbers (or seeds them), calls ``backward``, or reads or sets a leaf's ``.grad``, waits there
    until you have fetched all earlier results and ask for its own. ``torch.autograd.grad`` does not
    wait. Python's and numpy's random numbers come in no certain order: draw them for the items. Do
    not change weights.

    Runs have the modes of your thread: ``torch.no_grad``, ``inference_mode``, autocast,
    `mix_devices`, `gather_on`, torch's modes, current devices and streams.

    Args:
        model: a HookedTransformer or TransformerBridge, on any number of devices.
        run: a function of a view of the model and an item. It may be called in several threads
            at once.
        items: the inputs, possibly endless. This thread reads them, at most `max_in_flight` ahead.
        max_in_flight: caps unfetched runs, running or finished, because each holds its activations.
            By default one more than the model has devices, so that a run is ready as soon as the
            first device is free. On one device, 1.
        progress: show a bar.

    Yields:
        The results of `run`, in the order of the items. Fetching one begins the next run.

    Raises:
        TypeError: if `model` is of neither class, or `items` is no iterable.
        ValueError: if `max_in_flight` is less than 1.
        RuntimeError: if a run changed a parameter of the model, when its turn comes; if a run runs
            or hooks `model` itself; if the model's hooks changed between two results; if a run
            raised StopIteration, which would end the results.
        Exception: the error of a run, when its turn comes, with a note that names the item's index.
            After an error, on KeyboardInterrupt, and when you close the generator, other runs end
            at their next operation.

    >>> def run(model, tokens):
    ...     return model(tokens).mean().item()
    >>> means = list(pipeline_map(model, run, batches))  # doctest: +SKIP
    """
    check_iterable("items", items)
    adapter_of(model)  # which refuses anything but a model
    run = with_view_of(model, run)
    max_in_flight = n_in_flight(model, max_in_flight)
    if max_in_flight == 1:
        return _in_a_loop(model, run, items, progress)
    return _pipelined(model, run, items, progress, max_in_flight)


def refuse_arguments(
    function: Callable[..., object], call: Callable[..., object], model: Model, given: Iterable[str]
) -> None:
    """Refuse arguments of `function` that neither it, the `call` in it, nor the forward has."""
    # Only near misses for a Bridge, because its forward passes any others on to transformers.
    parameters = [signature(one).parameters for one in (function, call, model.forward)]
    passes_on = any(p.kind is p.VAR_KEYWORD for p in parameters[-1].values())
    names = itertools.chain(*parameters)
    refuse_unknown(f"{function.__name__}()", given, names, passes_on=passes_on)


def n_in_flight(model: Model, max_in_flight: int | None) -> int:
    """Return the largest number of runs in flight; see `pipeline_map`."""
    n_devices = len(_devices_of(model))
    if max_in_flight is None:
        return n_devices + 1 if n_devices > 1 else 1  # so one is ready when a device is free
    if not isinstance(max_in_flight, int) or max_in_flight < 1:
        raise ValueError(f"max_in_flight must be 1 or more runs, but is {shown(max_in_flight)}")
    return max_in_flight


def _in_a_loop(
    model: Model, run: Callable[[Model, Item], Result], items: Iterable[Item], progress: bool
) -> Generator[Result, None, None]:
    """Run each item when its result is fetched, in the caller's thread."""
    view = adapter_of(model).view_of(model)
    weights, hooks = WeightsSnapshot(model), _HooksSnapshot(model)
    with _bar(items, progress) as bar:
        for number, item in enumerate(items):
            hooks.check()
            if (name := weights.changed(in_place=False)) is not None:
                raise RuntimeError(
                    f"{name} was replaced between two results, but the runs keep the parameters of "
                    "the start: change its values in place, or call pipeline_map again"
                )
            yield _run_on(view, run, number, item)
            bar.update()


def _pipelined(
    model: Model,
    run: Callable[[Model, Item], Result],
    items: Iterable[Item],
    progress: bool,
    max_in_flight: int,
) -> Generator[Result, None, None]:
    """Start as many runs as may be under way, and one more for each result that is fetched."""
    devices = _devices_of(model, here=True)
    queue = DeviceQueue()

    def start(number: int, item: Item) -> Future[Result]:
        # With the state of this moment, because the caller may enter a mode between two results.
        viewed = views.pop() if views else (adapter_of(model).view_of(model), Streams())
        return pool.submit(CallersState(devices).run, work, number, item, viewed)

    def work(number: int, item: Item, viewed: tuple[View[Model], Streams]) -> Result:
        view, streams = viewed
        this_run = Run(number, queue, streams)
        try:
            with running(this_run), InOrder(this_run):
                return _run_on(view, run, number, item)
        finally:
            views.append(viewed)  # because making a view takes longer than restoring one

    with contextlib.ExitStack() as within:
        within.enter_context(seeding_in_order({device.type for device in devices}))
        pool = within.enter_context(threads(max_in_flight, thread_name_prefix="pipeline_map"))
        # Called before the pool waits for its threads, because those may wait in the queue.
        within.callback(queue.end)
        views: list[tuple[View[Model], Streams]] = []  # those of runs that have ended
        weights, hooks = WeightsSnapshot(model), _HooksSnapshot(model)
        bar = within.enter_context(_bar(items, progress))
        runs, starts = deque[Future[Result]](), _starting(start, items)
        runs.extend(itertools.islice(starts, max_in_flight))
        number = 0
        while runs:
            queue.request(number)  # from here on, this run may draw random numbers
            if runs[0].exception() is None:  # waits for the run
                # Before its result is used, because the run may have read changed weights.
                if (name := weights.changed()) is not None:
                    raise RuntimeError(
                        f"{name} was changed while the run of item {number} and others used it: "
                        f"change a copy of it in a hook, or {ONE_AT_A_TIME}"
                    )
                hooks.check()
                runs.extend(itertools.islice(starts, max_in_flight + 1 - len(runs)))
            # Without a name, because that would keep the result alive during the next run.
            yield runs.popleft().result()
            bar.update()
            number += 1


def _bar(items: Iterable[object], progress: bool) -> tqdm[object]:
    total = length_hint(items) or None  # None shows no end
    return hf_logging.tqdm(total=total, desc="Pipelined runs", disable=not progress)


def _starting(
    start: Callable[[int, Item], Future[Result]], items: Iterable[Item]
) -> Iterator[Future[Result]]:
    """Start a run for each item that is asked for; an error of `items` is a failed run's."""
    try:
        for number, item in enumerate(items):
            yield start(number, item)
    except Exception as error:  # noqa: BLE001  # raised when the runs before it are fetched
        failed = Future[Result]()
        failed.set_exception(error)
        yield failed


def _run_on(
    view: View[Model], run: Callable[[Model, Item], Result], number: int, item: Item
) -> Result:
    """Do one run, and restore the view; errors get a note with the item's index."""
    try:
        return run(view.model, item)
    except Exception as error:
        note(error, f"this error is from the run of item {number}")
        raise
    finally:
        view.restore()


ONE_AT_A_TIME = "run one at a time (max_in_flight=1, or a loop of run_with_hooks for a sweep)"


class WeightsSnapshot:
    """A model's parameters, and their state when this was made."""

    def __init__(self, model: Model) -> None:
        self._states = []
        for path, module in model.named_modules():
            for name, weight in module._parameters.items():
                if weight is not None and type(weight) is not RemoteTensor:
                    full_name = join_path(path, name).replace(f"{WRAPPED}.", "")
                    state = full_name, module._parameters, name, weight, _state(weight)
                    self._states.append(state)

    def changed(self, in_place: bool = True) -> str | None:
        """Return the first parameter that was replaced, or changed `in_place`, if any."""
        for full_name, parameters, name, weight, state in self._states:
            if parameters.get(name) is not weight or (in_place and _state(weight) != state):
                return full_name
        return None


class _HooksSnapshot:
    """The hooks on a model's hook points when its views were made, because views have these."""

    def __init__(self, model: Model) -> None:
        self._of_points = [
            (name, point, list(point.fwd_hooks), list(point.bwd_hooks))
            for name, point in model.hook_dict.items()
        ]

    def check(self) -> None:
        """Check that later hooks on the model are gone again."""
        for name, point, forward, backward in self._of_points:
            if point.fwd_hooks != forward or point.bwd_hooks != backward:
                raise RuntimeError(
                    f"hooks on {name} were added or removed between two results, but the runs keep "
                    "those of the start: change them before, or in `run` on its first argument"
                )


def _devices_of(model: Model, here: bool = False) -> tuple[torch.device, ...]:
    """Return the devices that a model computes on, or those on this host."""
    placement = placement_of(model)
    if placement is not None:
        return placement.here.devices if here else placement.devices
    return tuple(dict.fromkeys(parameter.device for parameter in model.parameters()))


def _state(weight: torch.Tensor) -> tuple[object, bool]:
    # `W.data.mul_(2)` goes unseen, because torch does not count it.
    return fingerprint(weight), weight.requires_grad

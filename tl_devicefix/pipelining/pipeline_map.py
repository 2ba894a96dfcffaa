"""`pipeline_map`: many runs of one model, each device computing for another of them."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from operator import length_hint
from typing import Any, TypeVar

import torch
import transformers.utils.logging as hf_logging

from tl_devicefix.adapters import adapter_of, class_names
from tl_devicefix.dispatch.scheduler import Run, Streams, Turns, running, take_own_tokenizer
from tl_devicefix.dispatch.views import restore
from tl_devicefix.offload.copying import values_of
from tl_devicefix.pipelining.in_order import InOrder, seeding_in_order
from tl_devicefix.pipelining.report import WatchedTurns
from tl_devicefix.placement.workers import CallersState, threads
from tl_devicefix.tracebacks import note

Item = TypeVar("Item")
Result = TypeVar("Result")


def pipeline_map(
    model: Any,
    run: Callable[[Any, Item], Result],
    items: Iterable[Item],
    max_in_flight: int | None = None,
    *,
    progress: bool = False,
    report: bool = False,
) -> Iterator[Result]:
    """Yield ``run(model, item)`` for each item, in order, with several runs under way at a time.

    A model over n devices computes on one of them at a time: here, while one run is on the second
    device, the next one is on the first. Each run is a thread, and is given a view of the model:
    the same class, parameters, config and placement, and hooks of its own. So hooks that a run
    adds are seen by no other, and are gone with it; attributes that a run sets on modules are gone
    too, but not those of the config, which is the model's.

    Results are those of ``[run(model, item) for item in items]``, bit for bit. Operations on shared
    state run in the order of your items: a run that draws torch's random numbers (or seeds them),
    calls ``backward``, or reads or sets a leaf's ``.grad``, waits there until you have fetched all
    earlier results and ask for its own. For gradients that need not wait, take
    ``torch.autograd.grad``. Python's and numpy's random numbers are not put in order: draw them
    for the items. Do not change weights.

    Within a run, the modes of the caller's thread are in force: ``torch.no_grad``,
    ``inference_mode``, autocast, `mix_devices`, `gather_on`, torch's modes, current devices and
    streams.

    Args:
        model: a HookedTransformer or TransformerBridge, on any number of devices.
        run: a function of a view of the model and an item. It may be called in several threads
            at once.
        items: may be endless: it is read in this thread, and no further than `max_in_flight` ahead.
        max_in_flight: the most runs that are under way or finished and not fetched, each of which
            holds its activations. By default one more than the model has devices: as many as can
            compute at once, and one that is ready as soon as the first device is free. On one
            device, 1.
        progress: show a bar.
        report: print at the end how long it took, and each device's busy share.

    Yields:
        What `run` returned, in the items' order. The next run begins when a result is fetched.

    Raises:
        TypeError: if `model` is of neither class.
        ValueError: if `max_in_flight` is less than 1.
        RuntimeError: if a run changed a parameter of the model, when its turn comes.
        Exception: an error of a run, when its turn comes, with a note that names the item's index;
            a RuntimeError for StopIteration, which would end the results. Then, on
            KeyboardInterrupt, and when the generator is closed, runs that are under way end at the
            next thing that they do with torch.

    >>> def run(model, tokens):
    ...     return model(tokens).mean().item()
    >>> means = list(pipeline_map(model, run, batches))  # doctest: +SKIP
    """
    make_view = viewing(model)
    max_in_flight = n_in_flight(model, max_in_flight)
    hint = length_hint(items, -1)
    count = None if hint < 0 else hint
    bar = functools.partial(
        hf_logging.tqdm, total=count, desc="Pipelined runs", disable=not progress
    )
    if max_in_flight == 1 and not report:
        return _in_a_loop(make_view, run, items, bar)
    n_views = max_in_flight if count is None else min(max_in_flight, count)
    workers = _Workers(model, run, make_view, max_in_flight, n_views, report)
    return _pipelined(workers, items, max_in_flight, bar)


def n_in_flight(model: Any, max_in_flight: int | None) -> int:
    """How many runs are in flight at most; see `pipeline_map`."""
    viewing(model)  # refuses anything but a model
    n_devices = len(devices_of(model))
    if max_in_flight is None:
        return n_devices + 1 if n_devices > 1 else 1
    if isinstance(max_in_flight, bool) or not isinstance(max_in_flight, int) or max_in_flight < 1:
        raise ValueError(f"max_in_flight must be 1 or more runs, but is {max_in_flight!r}")
    return max_in_flight


def _in_a_loop(
    make_view: Callable[[], Any],
    run: Callable[[Any, Any], Result],
    items: Iterable[Any],
    make_bar: Callable[[], Any],
) -> Iterator[Result]:
    """Each run when it is fetched, in the caller's thread."""
    view = make_view()
    with make_bar() as bar:
        for number, item in enumerate(items):
            yield _run_on(view, run, number, item)
            bar.update()


def _pipelined(
    workers: _Workers, items: Iterable[Any], max_in_flight: int, make_bar: Callable[[], Any]
) -> Iterator[Any]:
    """The schedule: start as many runs as may be under way, and one more for each result."""
    runs, starts = deque[Future[Any]](), _starting(workers, items)
    with workers, make_bar() as bar:
        runs.extend(itertools.islice(starts, max_in_flight))
        number = 0
        while runs:
            workers.want(number)
            if runs[0].exception() is None:  # which waits for the run
                workers.check_weights(number)
                runs.extend(itertools.islice(starts, max_in_flight + 1 - len(runs)))
            yield runs.popleft().result()  # by no name, which would hold it for the next run's time
            bar.update()
            number += 1
        workers.print_report()


def _starting(workers: _Workers, items: Iterable[Any]) -> Iterator[Future[Any]]:
    """Start a run for each item that is asked for; an error of `items` is a failed run's."""
    numbered = enumerate(items)
    while True:
        try:
            following = next(numbered, None)
        except Exception as error:  # noqa: BLE001  # raised when the runs before it are fetched
            failed = Future[Any]()
            failed.set_exception(error)
            yield failed
            return
        if following is None:
            return
        yield workers.start(*following)


def _run_on(view: Any, run: Callable[[Any, Any], Result], number: int, item: Any) -> Result:
    """One run, after which the view is as before; an error says which item it is of."""
    try:
        return run(view, item)
    except Exception as error:
        note(error, f"pipeline_map: this error is from the run of item {number}")
        raise
    finally:
        restore(view)


class _Workers:
    """Threads with a view of the model each, which take turns on the devices.

    Args:
        model: whose views they get.
        run: what each does.
        make_view: makes a view.
        n_threads: how many runs may be under way.
        n_views: how many begin together. They are made before the first begins, so that runs have
            visits of offloaded blocks in common.
        report: whether to watch where the time goes.
    """

    def __init__(
        self,
        model: Any,
        run: Callable[[Any, Any], Any],
        make_view: Callable[[], Any],
        n_threads: int,
        n_views: int,
        report: bool,
    ) -> None:
        self._model, self._run, self._make_view = model, run, make_view
        self._n_threads, self._n_views = n_threads, n_views
        self._devices = devices_of(model)
        self._turns = WatchedTurns(self._devices) if report else Turns()
        self._within = contextlib.ExitStack()

    def __enter__(self) -> _Workers:
        kinds = dict.fromkeys(device.type for device in self._devices)
        self._within.callback(self._turns.visits.clear)
        self._within.enter_context(seeding_in_order(kinds))
        self._pool = self._within.enter_context(
            threads(self._n_threads, thread_name_prefix="pipeline_map")
        )
        self._within.callback(self._turns.end)  # before the threads are waited for
        self._views = [(self._make_view(), Streams()) for _ in range(self._n_views)]
        # `W.data.mul_(2)` is not seen, as torch does not count it.
        named = self._model.named_parameters() if self._n_threads > 1 else ()
        self._weights = [(name, weight, _state(weight)) for name, weight in named]
        return self

    def __exit__(self, *error: Any) -> None:
        self._within.close()

    def want(self, number: int) -> None:
        """Say that a run's result is waited for."""
        self._turns.want(number)

    def check_weights(self, number: int) -> None:
        """Check that no run has changed a weight that others use at the same time.

        Raises:
            RuntimeError: naming one that was changed.
        """
        for name, weight, state in self._weights:
            if _state(weight) != state:
                raise RuntimeError(
                    f"{name} was changed while the run of item {number} and others used it: change "
                    "a copy of it in a hook, or pass max_in_flight=1"
                )

    def print_report(self) -> None:
        """Print where the time went, if a report was asked for."""
        if isinstance(self._turns, WatchedTurns):
            print(self._turns.report())

    def start(self, number: int, item: Any) -> Future[Any]:
        """Have a run begin, with the modes of this thread."""
        state = CallersState(self._devices)
        viewed = self._views.pop() if self._views else (self._make_view(), Streams())
        return self._pool.submit(state.run, self._work, number, item, viewed)

    def _work(self, number: int, item: Any, viewed: tuple[Any, Streams]) -> Any:
        view, streams = viewed
        run = Run(number, self._turns, streams)
        try:
            with running(run), InOrder(run):
                take_own_tokenizer(view)
                return _run_on(view, self._run, number, item)
        finally:
            self._views.append(viewed)


def devices_of(model: Any) -> tuple[torch.device, ...]:
    """The devices that a model computes on."""
    if hasattr(model, "placement"):
        return tuple(model.placement.devices)
    return tuple(dict.fromkeys(parameter.device for parameter in model.parameters()))


def viewing(model: Any) -> Callable[[], Any]:
    """A function that makes views of a model: modules and hooks of their own, the same weights.

    Raises:
        TypeError: if the model is of neither class.
    """
    adapter = adapter_of(model)
    if adapter is not None:
        return functools.partial(adapter.view_of, model)
    raise TypeError(f"the model must be a {class_names()}, but is a {type(model).__name__}")


def _state(weight: torch.Tensor) -> Any:
    """A fingerprint of a weight, which a change of the weight changes."""
    return values_of(weight), weight.requires_grad

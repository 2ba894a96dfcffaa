"""`pipeline_map`: many runs of one model, each device computing for another of them."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
import transformers.utils.logging as hf_logging

from tl_devicefix.dispatch.scheduler import Run, Streams, Turns, running
from tl_devicefix.dispatch.views import restore
from tl_devicefix.pipelining.in_order import InOrder, seeding_in_order
from tl_devicefix.pipelining.reporting import NotingWaits, WatchedTurns
from tl_devicefix.pipelining.viewing import viewing
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
    adds are seen by no other, and are gone with it; what a run sets on modules is gone too, but
    not what it sets on the config, which is the model's.

    Results are those of ``[run(model, item) for item in items]``, bit for bit. What the runs of a
    loop would do to something shared in a certain order, they do in that order: a run that draws
    random numbers of torch's (or seeds it), calls ``backward``, or reads or sets a leaf's
    ``.grad``, waits there until the results before its own have been fetched, and its own is
    asked for. For gradients that are in flight too, take ``torch.autograd.grad``. Python's and
    numpy's random numbers are not put in order: draw them for the items. Weights are not to be
    changed.

    Within a run, what is in force in the caller's thread is in force: ``torch.no_grad``,
    ``inference_mode``, autocast, `mix_devices`, `gather_on`, torch's modes, current devices and
    streams.

    Args:
        model: a HookedTransformer or TransformerBridge, on any number of devices.
        run: what to do with a view of the model and an item. It may be called in several threads
            at once.
        items: may be endless: it is read in this thread, and no further than `max_in_flight` ahead.
        max_in_flight: the most runs that are under way or finished and not fetched, each of which
            holds its activations. By default one more than the model has devices: as many as can
            compute at once, and one that is there as soon as the first device is free. On one
            device, 1.
        progress: show a bar.
        report: print at the end how long it took, each device's busy share, and what waited.

    Yields:
        What `run` returned, in the items' order. The next run begins when a result is fetched.

    Raises:
        TypeError: if `model` is of neither class.
        ValueError: if `max_in_flight` is less than 1.
        RuntimeError: if a run changed a parameter of the model, when its turn comes.
        Exception: what a run raised, when its turn comes, with a note that names the item's index;
            a RuntimeError for StopIteration, which would end the results. Then, on
            KeyboardInterrupt, and when the generator is closed, runs that are under way end at the
            next thing that they do with torch.

    >>> def run(model, tokens):
    ...     return model(tokens).mean().item()
    >>> means = list(pipeline_map(model, run, batches))  # doctest: +SKIP
    """
    make_view, n_devices = viewing(model), len(devices_of(model))
    if max_in_flight is None:
        max_in_flight = n_devices + 1 if n_devices > 1 else 1
    if isinstance(max_in_flight, bool) or not isinstance(max_in_flight, int) or max_in_flight < 1:
        raise ValueError(f"max_in_flight must be 1 or more runs, but is {max_in_flight!r}")
    source = _Items(items)
    if max_in_flight == 1 and not report:
        return _one_by_one(make_view, run, source, progress)
    return _fetched(_Flight(model, run, max_in_flight, report), source, max_in_flight, progress)


class _Items:
    """Items with their numbers. An error of theirs is kept until the runs before it are fetched."""

    def __init__(self, items: Iterable[Any]) -> None:
        self.count = len(items) if isinstance(items, Sized) else None
        self._rest = enumerate(items)
        self._error: Exception | None = None

    def next(self) -> tuple[int, Any] | None:
        """The next one; None at the end."""
        try:
            return None if self._error else next(self._rest, None)
        except Exception as error:  # noqa: BLE001  # whatever it is, it is raised later
            self._error = error
            return None

    def end(self) -> None:
        """Raise what was kept."""
        if self._error is not None:
            raise self._error


def _one_by_one(
    make_view: Callable[[], Any], run: Callable[[Any, Any], Result], items: _Items, progress: bool
) -> Iterator[Result]:
    """Each run when it is fetched, in the caller's thread."""
    view = make_view()
    with _bar(items, progress) as bar:
        while (found := items.next()) is not None:
            yield _run_on(view, run, *found)
            bar.update()
    items.end()


def _fetched(flight: _Flight, items: _Items, max_in_flight: int, progress: bool) -> Iterator[Any]:
    """Results as they are fetched, while later runs are under way."""
    under_way = deque[Future[Any]]()

    def fill(most: int) -> None:
        while len(under_way) < most and (found := items.next()) is not None:
            under_way.append(flight.start(*found))

    with flight, _bar(items, progress) as bar:
        flight.make_ready(max_in_flight if items.count is None else min(max_in_flight, items.count))
        fill(max_in_flight)
        n_fetched = 0
        while under_way:
            flight.want(n_fetched)
            if under_way[0].exception() is None:  # which waits
                flight.check_weights(n_fetched)
                fill(max_in_flight + 1)
            n_fetched += 1
            # By no name of this frame, which would hold the result for the next run's time.
            yield under_way.popleft().result()
            bar.update()
        flight.tell()
    items.end()


def _run_on(view: Any, run: Callable[[Any, Any], Result], number: int, item: Any) -> Result:
    """One run, after which the view is as before; an error says which item it is of."""
    try:
        return run(view, item)
    except StopIteration as error:  # which no generator can raise
        raise RuntimeError(
            f"pipeline_map: the run of item {number} raised StopIteration: catch it there, and "
            "return what says so"
        ) from error
    except Exception as error:
        note(error, f"pipeline_map: this is of the run of item {number}")
        raise
    finally:
        restore(view)


def _bar(items: _Items, progress: bool) -> Any:
    return hf_logging.tqdm(total=items.count, desc="Runs in flight", disable=not progress)


class _Flight:
    """The threads and views of runs that are under way together.

    Args:
        model: whose views they get.
        run: what each does.
        max_in_flight: how many there are.
        report: whether to watch where the time goes.
    """

    def __init__(
        self, model: Any, run: Callable[[Any, Any], Any], max_in_flight: int, report: bool
    ) -> None:
        self._make_view = viewing(model)
        self._run = run
        self._devices = devices_of(model)
        placement = getattr(model, "placement", None)
        self._offloads = placement and any(each.offloaded for each in placement.components)
        self._turns = WatchedTurns(self._devices) if report else Turns()
        self._within = contextlib.ExitStack()
        self._at_once = max_in_flight
        self._seats: list[tuple[Any, Streams]] = []
        self._weights = _Weights(model) if max_in_flight > 1 else None

    def __enter__(self) -> _Flight:
        kinds = dict.fromkeys(each.type for each in self._devices)
        self._within.callback(self._turns.visits.clear)
        self._within.enter_context(seeding_in_order(kinds))
        self._pool = self._within.enter_context(
            threads(self._at_once, thread_name_prefix="pipeline_map")
        )
        self._within.callback(self._turns.end)  # before the threads are waited for
        return self

    def __exit__(self, *error: Any) -> None:
        self._within.close()

    def make_ready(self, count: int) -> None:
        """Have so many runs begin together, where they may have visits of blocks in common."""
        if self._offloads:
            self._seats = [(self._make_view(), Streams()) for _ in range(count)]

    def want(self, number: int) -> None:
        """Say that a run's result is waited for."""
        self._turns.want(number)

    def check_weights(self, number: int) -> None:
        """Check that weights are as they were, when a run's turn comes: a loop's would see changes.

        Raises:
            RuntimeError: naming one that is not.
        """
        if self._weights is not None:
            self._weights.check(number)

    def tell(self) -> None:
        """Print where the time went, if that was watched."""
        if isinstance(self._turns, WatchedTurns):
            print(self._turns.report())

    def _noting_waits(self) -> contextlib.AbstractContextManager[Any]:
        turns = self._turns
        return NotingWaits(turns) if isinstance(turns, WatchedTurns) else contextlib.nullcontext()

    def start(self, number: int, item: Any) -> Future[Any]:
        """Have a run begin, with what is in force in this thread."""
        seat = self._seats.pop() if self._seats else (self._make_view(), Streams())
        state = CallersState(self._devices)
        return self._pool.submit(state.run, self._fly, number, item, seat)

    def _fly(self, number: int, item: Any, seat: tuple[Any, Streams]) -> Any:
        view, streams = seat
        run = Run(number, self._turns, streams)
        try:
            with running(run), InOrder(run), self._noting_waits():
                return _run_on(view, self._run, number, item)
        finally:
            self._seats.append(seat)


def devices_of(model: Any) -> tuple[torch.device, ...]:
    """The devices that a model computes on."""
    if hasattr(model, "placement"):
        return tuple(model.placement.devices)
    return tuple(dict.fromkeys(parameter.device for parameter in model.parameters()))


class _Weights:
    """The weights of a model, that no run may change, as others use them at the same time.

    `W.data.mul_(2)` is not seen, as torch does not count it.
    """

    def __init__(self, model: Any) -> None:
        self._weights = [(name, weight) for name, weight in model.named_parameters()]
        self._states = [_state(weight) for _, weight in self._weights]

    def check(self, number: int) -> None:
        """Check that they are as they were.

        Raises:
            RuntimeError: naming one that is not.
        """
        for (name, weight), state in zip(self._weights, self._states):
            if _state(weight) != state:
                raise RuntimeError(
                    f"{name} was changed when the run of item {number} was in flight, and others "
                    "with it, which use it too: change a copy of it in a hook, or give "
                    "max_in_flight=1"
                )


def _state(weight: torch.Tensor) -> tuple[int, int, bool]:
    """What tells that a weight was changed."""
    version = 0 if weight.is_inference() else weight._version
    return version, weight.data_ptr(), weight.requires_grad

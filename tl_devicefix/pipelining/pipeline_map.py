"""`pipeline_map`: many runs of one model at the same time, each device busy with a different run.

`dispatch/scheduler.py` draws how runs take turns.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from inspect import signature
from operator import length_hint
from typing import Any, TypeVar

import torch
import transformers.utils.logging as hf_logging

from tl_devicefix.adapters import adapter_of
from tl_devicefix.around import Args, Forward, Kwargs
from tl_devicefix.dispatch.mixing import OutsideBlocks, runs_users_code
from tl_devicefix.dispatch.naming import WRAPPED, each_module, join_path
from tl_devicefix.dispatch.scheduler import (
    DeviceQueue,
    Run,
    Streams,
    n_hooked_outside_runs,
    removing_hooks,
    running,
    with_view_of,
)
from tl_devicefix.dispatch.views import View
from tl_devicefix.errors import note, refuse_unknown, shown
from tl_devicefix.fusing.fused import applies_dropout
from tl_devicefix.fusing.listening import IN_VIEW, hooks_of
from tl_devicefix.monkeypatch.patch import LIBRARIES, package_of
from tl_devicefix.placement.devices import stamp
from tl_devicefix.placement.elsewhere import TensorElsewhere
from tl_devicefix.placement.placement import placement_of
from tl_devicefix.placement.workers import CallersState, threads
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
    """Yield ``run(model, item)`` for each item, in order, with several runs at the same time.

    A loop uses one of a model's n devices at a time. Here, while one run is on the second device,
    the next one is on the first. You get the results of ``[run(model, item) for item in items]``,
    bit for bit.

    With ``max_in_flight=1`` (the default on one device), this is that loop: `run` gets the model
    itself. So it is for a run's own view, and if a function or object of yours on the model (a
    permanent hook, a ``forward``) holds one of the model's modules. Otherwise each run has a
    thread, and a view of the model: the same class, parameters, config and placement, but its own
    hooks. A run may read `model` itself, but neither run nor hook it; a view's `hook.ctx` is
    emptied when the run ends, so return a copy. Either way, hooks that a run adds to hook points
    are gone then.

    Runs in flight may not change what they share. A run raises if it draws torch's random numbers
    (without its own ``torch.Generator``), calls ``backward``, reads or sets a leaf's ``.grad``,
    changes a config flag, removes a hook that the model had before, or fuses blocks.
    ``torch.autograd.grad`` is fine. Python's and numpy's random numbers come in no fixed order:
    draw them before, and pass them in the items. Weights, and attributes of modules, may not change
    either: a change raises, at the end or at an earlier check. Between results you may run the
    model, but leave no new hooks on it: that raises, as runs keep the hooks of the start.

    Runs have the modes of your thread: ``torch.no_grad``, ``inference_mode``, autocast,
    `mix_devices`, `gather_on`, torch's modes, current devices and streams.

    Args:
        model: a HookedTransformer or TransformerBridge, on any number of devices.
        run: a function of the model (or a view of it) and an item. It may be called in several
            threads at the same time.
        items: the inputs, possibly endless. Your thread reads them, at most `max_in_flight` ahead.
        max_in_flight: caps unfetched runs, running or finished: each holds its activations.
            By default one more than the model has devices, so that a run is ready as soon as the
            first device is free; on one device, 1.
        progress: show a bar.

    Yields:
        The results of `run`, in the order of the items. Fetching one begins the next run.

    Raises:
        TypeError: if `model` is of neither class, or `items` cannot be iterated over.
        ValueError: if `max_in_flight` is less than 1.
        RuntimeError: if a run in flight uses what runs share; if it runs or hooks `model` itself;
            if the model's hooks changed between two results; if the model has dropout that is on;
            if a run raised StopIteration, which would end the results.
        Exception: the error of a run, when its turn comes, with a note that names the item's index.
            After an error, on KeyboardInterrupt, and when you close the generator, other runs end
            at their next block, or their next operation outside of the model.

    >>> def run(model, tokens):
    ...     return model(tokens).mean().item()
    >>> means = list(pipeline_map(model, run, batches))  # doctest: +SKIP
    """
    adapter_of(model)  # raises for anything but a model
    max_in_flight = n_in_flight(model, max_in_flight)
    total = length_hint(items) or None  # None: unknown
    bar = hf_logging.tqdm(enumerate(items), "Pipelined runs", total, disable=not progress)
    return run_all(model, _numbered(run), bar, max_in_flight)


def run_all(
    model: Model, run: Callable[[Model, Item], Result], items: Iterable[Item], max_in_flight: int
) -> Generator[Result, None, None]:
    """Yield the result of each item, as `pipeline_map` does, without checks and notes."""
    # A run in flight may call this for its own view: its runs go one after the other.
    is_loop = max_in_flight == 1 or IN_VIEW in vars(model)
    view = None if is_loop else adapter_of(model).view_of(model)
    if view is not None and not view.is_captured:
        yield from _pipelined(model, with_view_of(model, run), items, max_in_flight, view)
        return
    run_alone = removing_hooks()(run)
    for item in items:
        yield run_alone(model, item)


def _numbered(
    run: Callable[[Model, Item], Result],
) -> Callable[[Model, tuple[int, Item]], Result]:
    """Return `run` for numbered items; errors get a note with the number."""

    def numbered(model: Model, numbered_item: tuple[int, Item]) -> Result:
        number, item = numbered_item
        try:
            return run(model, item)
        except Exception as error:
            note(error, f"this error is from the run of item {number}")
            raise

    return numbered


def refuse_arguments(
    function: Callable[..., object], call: Callable[..., object], model: Model, given: Iterable[str]
) -> None:
    """Refuse arguments that `function`, its inner `call` and the forward all lack."""
    # A Bridge's forward passes unknown names on to transformers, so only near misses are refused.
    parameters = [signature(one).parameters for one in (function, call, model.forward)]
    passes_on = any(p.kind is p.VAR_KEYWORD for p in parameters[-1].values())
    names = itertools.chain(*parameters)
    refuse_unknown(f"{function.__name__}()", given, names, passes_on=passes_on)


def n_in_flight(model: Model, max_in_flight: int | None) -> int:
    """Return `max_in_flight`, or its default; see `pipeline_map`."""
    n_devices = len(_computing_devices(model))
    if max_in_flight is None:
        return n_devices + 1 if n_devices > 1 else 1
    if not isinstance(max_in_flight, int) or max_in_flight < 1:
        raise ValueError(
            f"max_in_flight must be an int of 1 or more, but is {shown(max_in_flight)}"
        )
    return max_in_flight


def _pipelined(
    model: Model,
    run: Callable[[Model, Item], Result],
    items: Iterable[Item],
    max_in_flight: int,
    view: View[Model],
) -> Generator[Result, None, None]:
    """Start as many runs as may be in flight, and one more for each result that is fetched."""
    _refuse_dropout(model)
    devices, pauses = _computing_devices(model, here=True), not runs_users_code(model)
    queue = DeviceQueue()

    def start(number: int, item: Item) -> Future[Result]:
        if not free:
            another = adapter_of(model).view_of(model)
            if another.is_captured:
                raise RuntimeError(
                    "a function that holds a module of the model was added to it between two "
                    f"results: add it before, or {ONE_AT_A_TIME}"
                )
            made.append(another)
            free.append((another, Streams()))
        # Take the caller's state now: the caller may enter a mode between two results.
        return pool.submit(CallersState(devices).run, work, number, item, free.pop())

    def work(number: int, item: Item, viewed: tuple[View[Model], Streams]) -> Result:
        view, streams = viewed
        this_run = Run(number, queue, streams)
        hooks = [_users_hooks([attributes]) for attributes in view.hooked]
        try:
            with running(this_run), RefuseShared(this_run, pauses):
                result = run(view.model, item)
            if (name := view.shared_setting()) is not None:
                raise RuntimeError(
                    f"cfg.{name} was changed during run {number}, but all runs share the config: "
                    f"set it before, or {ONE_AT_A_TIME}"
                )
            for attributes, before in zip(view.hooked, hooks, strict=True):
                if not before <= _users_hooks([attributes]):
                    raise RuntimeError(
                        f"run {number} removed a hook that was on {attributes['name']} before, but "
                        "the other runs keep it: remove it before (model.reset_hooks()), or "
                        f"{ONE_AT_A_TIME}"
                    )
            return result
        finally:
            view.restore()
            free.append(viewed)  # making a view takes longer than restoring one

    def check_all() -> None:
        if runs:  # otherwise they were checked before the last result
            snapshot.check(number, is_last=True)
        for view in made:
            if (setting := view.kept_setting()) is not None:
                raise RuntimeError(
                    f"a run set {setting} in its view, which some of the other runs may have or "
                    f"not: set it on the model before, or {ONE_AT_A_TIME}"
                )

    made = [view]
    free = [(view, Streams())]  # views without a run, except those of cancelled runs
    snapshot, number = ModelSnapshot(model), 0
    # Call `check_all` once all runs have ended.
    with checking_at_end(check_all), contextlib.ExitStack() as within:
        pool = within.enter_context(threads(max_in_flight, thread_name_prefix="pipeline_map"))
        # End the queue before the pool waits for its threads, which may wait in the queue.
        within.callback(queue.end)
        runs, starts = deque[Future[Result]](), _starting(start, items)
        runs.extend(itertools.islice(starts, max_in_flight))
        while runs:
            if runs[0].exception() is None:  # waits for the run
                runs.extend(itertools.islice(starts, max_in_flight + 1 - len(runs)))
                # Check before the result is used: the run may have read changed weights.
                snapshot.check(number, is_last=len(runs) == 1)
            # Do not bind the result: a name would keep it alive during the next run.
            yield runs.popleft().result()
            number += 1


@contextlib.contextmanager
def checking_at_end(check: Callable[[], None]) -> Iterator[None]:
    """Call `check` when a `with` block ends, or its generator is closed, but not after an error."""
    try:
        yield
    except GeneratorExit:
        check()
        raise
    check()


def _refuse_dropout(model: Model) -> None:
    """Refuse a model that draws random numbers in its forward."""
    for name, module in (getattr(model, "original_model", None) or model).named_modules():
        if applies_dropout(module):
            raise RuntimeError(
                f"{name} applies dropout, for which runs in flight would draw random numbers in no "
                "fixed order: call model.eval(), or pass max_in_flight=1"
            )


def _starting(
    start: Callable[[int, Item], Future[Result]], items: Iterable[Item]
) -> Iterator[Future[Result]]:
    """Yield a started run for each item; an error of `items` becomes a failed run."""
    try:
        for number, item in enumerate(items):
            yield start(number, item)
    except Exception as error:  # noqa: BLE001  # raised after the runs before it
        failed = Future[Result]()
        failed.set_exception(error)
        yield failed


STEADY_LIBRARIES = (*LIBRARIES, "bitsandbytes", "peft")
"""Libraries whose modules and hooks do the same in each run."""
ONE_AT_A_TIME = "run one at a time (max_in_flight=1, or a loop of run_with_hooks for a sweep)"


class ModelSnapshot:
    """A model's parameters, the state of each when the snapshot was taken, and the users' hooks."""

    def __init__(self, model: Model) -> None:
        self._model, modules = model, list(each_module(model))
        self._states = [
            (module._parameters, name, weight, stamp(weight))
            for module in modules
            for name, weight in module._parameters.items()
            if weight is not None and not isinstance(weight, TensorElsewhere)
        ]
        self._attributes = [vars(module) for module in modules]
        self._hooked = [
            each for each in self._attributes if any(hooks_of(each)) and _users_hooks([each])
        ]
        self._hooks, self._n_hooked = _users_hooks(self._hooked), n_hooked_outside_runs()
        self._next = 1  # the number of the result to check at

    def check(self, number: int, is_last: bool = False) -> None:
        """Check that no parameter was replaced or changed in place, and no hook added or removed.

        Hooks that were there are looked for each time. All modules are visited only before results
        1, 8, 64 and so on, before the last, and after hook points got hooks outside of runs.

        Args:
            number: the index of the result.
            is_last: True to check in any case.

        Raises:
            RuntimeError: if a parameter was changed, or a user's hook added or removed.
        """
        n_hooked = n_hooked_outside_runs()
        visits_all = is_last or number == self._next or n_hooked != self._n_hooked
        hooks = _users_hooks(self._attributes if visits_all else self._hooked)
        if hooks != self._hooks:
            name = self._name_of({of_hooks for of_hooks, _ in hooks ^ self._hooks})
            raise RuntimeError(
                f"hooks on {name} were added or removed between two results, but the runs keep "
                "those of the start: change them before, or in the runs"
            )
        if not visits_all:
            return
        self._n_hooked = n_hooked
        if number == self._next:
            self._next *= 8
        for parameters, key, weight, state in self._states:
            if parameters.get(key) is not weight or stamp(weight) != state:
                name = self._name_of({id(parameters)})
                raise RuntimeError(
                    f"{join_path(name, key)} was changed before result {number}, while runs used "
                    "it, so earlier results may have used either value: change a copy of it in a "
                    f"hook, or {ONE_AT_A_TIME}"
                )

    def _name_of(self, ids: set[int]) -> str:
        """Return the name of a module that has a dict with one of these ids."""
        for name, module in self._model.named_modules():
            if any(id(each) in ids for each in (module._parameters, *hooks_of(vars(module)))):
                return name.replace(f"{WRAPPED}.", "")
        return "the model"


def _users_hooks(modules: list[dict[str, Any]]) -> set[tuple[int, int]]:
    """Return the users' hooks on modules, given their attributes: the id of each dict, a number."""
    return {
        (id(hooks), number)
        for attributes in modules
        for hooks in filter(None, hooks_of(attributes))
        for number, hook in hooks.items()
        if is_users_hook("fwd_hooks" in attributes, hook)
    }


def is_users_hook(is_on_hook_point: bool, hook: object) -> bool:
    """Return True if a hook of PyTorch is neither this package's nor a library's own."""
    package = package_of(hook)
    # On a hook point, TransformerLens's own functions call a user's.
    return package != "tl_devicefix" and (is_on_hook_point or package not in STEADY_LIBRARIES)


def _computing_devices(model: Model, here: bool = False) -> tuple[torch.device, ...]:
    """Return the devices that a model computes on; if `here`, only those of this host."""
    placement = placement_of(model)
    if placement is not None:
        return placement.here.devices if here else placement.devices
    return tuple(dict.fromkeys(parameter.device for parameter in model.parameters()))


# Compare names: torch, torch.Tensor and torch.nn.functional have different objects for one name.
_RANDOM = {
    *("alpha_dropout", "feature_alpha_dropout", "feature_dropout", "native_dropout"),
    *("bernoulli", "binomial", "cauchy", "exponential", "geometric", "gumbel_softmax"),
    *("multinomial", "normal", "poisson", "rand", "rand_like", "randint", "randint_like", "randn"),
    *("randn_like", "random", "randperm", "rrelu", "rrelu_with_noise", "uniform"),
    *("_sample_dirichlet", "_standard_gamma", "gru", "lstm", "rnn_relu", "rnn_tanh"),
    *("fractional_max_pool2d", "fractional_max_pool3d", "multi_head_attention_forward"),
    *("fractional_max_pool2d_with_indices", "fractional_max_pool3d_with_indices"),
    *("lobpcg", "pca_lowrank", "svd_lowrank", "kaiming_normal", "kaiming_uniform", "orthogonal"),
    *("sparse", "trunc_normal", "log_normal", "xavier_normal", "xavier_uniform"),
}
# Functions that draw unless an argument is false or zero: its position, names and default.
_UNLESS: dict[str, tuple[int, tuple[str, ...], float]] = {
    **dict.fromkeys(
        ("dropout", "dropout1d", "dropout2d", "dropout3d"), (2, ("training", "train"), True)
    ),
    "scaled_dot_product_attention": (4, ("dropout_p",), 0.0),
}
_GRAD: Any = torch.Tensor.grad  # a descriptor
_OF_GRAD = {_GRAD.__get__, _GRAD.__set__, _GRAD.__delete__}


class RefuseShared(OutsideBlocks):
    """A mode that raises if a run uses what all runs share, or goes on after the map has ended.

    A model's own forward draws no random numbers outside of training, so it runs without the mode,
    unless users' torch hooks or `forward`s run there: then `pauses` is False.
    """

    def __init__(self, run: Run, pauses: bool) -> None:
        super().__init__()
        self._run = run
        self._pauses = pauses

    def pauses_in(self, model: Model) -> bool:
        """Return True if the mode is off in a model's forward."""
        return self._pauses

    def __torch_function__(
        self, func: Forward, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        self._run.queue.check()
        name = getattr(func, "__name__", "")
        if name == "backward" or (func in _OF_GRAD and args[0].is_leaf and args[0].requires_grad):
            called = "reading or setting it" if func in _OF_GRAD else name
            raise RuntimeError(
                f"{called} uses .grad, which all runs in flight share: use "
                f"torch.autograd.grad(loss, tensors), or {ONE_AT_A_TIME}"
            )
        if _draws(name, args, kwargs):
            raise RuntimeError(
                f"{name} draws random numbers in a run in flight, where runs would draw them in no "
                "fixed order: draw them before and pass them in the items, give the run its own "
                f"torch.Generator (or `generate` do_sample=False), or {ONE_AT_A_TIME}"
            )
        return func(*args, **kwargs)


def _draws(name: str, args: Args, kwargs: Kwargs) -> bool:
    """Return True if a function of torch with this name draws from torch's own generator."""
    # "rand.default" is one of torch.ops.aten, and "normal_" works in place.
    name = name.partition(".")[0].rstrip("_")
    draws = name in _RANDOM
    if name in _UNLESS:
        position, names, default = _UNLESS[name]
        given = (kwargs[name] for name in names if name in kwargs)
        draws = bool(args[position] if len(args) > position else next(given, default))
    return draws and kwargs.get("generator") is None

"""Runs of one model that are launched one after the other, before earlier ones have been computed.

The host launches a run's operations, and the devices compute them later: see `RunAhead`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from typing import TypeVar

import torch
from torch import nn

from tl_devicefix.dispatch.mixing import runs_users_code, tensors_in
from tl_devicefix.dispatch.scheduler import RunAhead, current_run, launching, removing_hooks
from tl_devicefix.monkeypatch.patch import is_of_user
from tl_devicefix.placement.devices import module_with_streams
from tl_devicefix.types import Model

Item = TypeVar("Item")
Result = TypeVar("Result")


def may_launch_ahead(model: Model, home: torch.device) -> bool:
    """Return True if `home` has streams, no run is in flight, and the user's only code is hooks.

    A run ends on its own stream. A tensor that other user code frees there may be of home's main
    stream, which would reuse its memory too early.
    """
    if module_with_streams(home) is None or current_run() is not None:
        return False
    users = is_of_user(type(model)) or is_of_user(model.loss_fn)
    return not users and not runs_users_code(model)


def launch_all(
    model: Model,
    home: torch.device,
    run: Callable[[Model, Item], Result],
    items: Iterable[Item],
    n_ahead: int,
) -> Generator[Result, None, None]:
    """Yield `run(model, item)` for each item, in order; all run in this thread.

    At most `n_ahead` runs are launched but not yet yielded. After an error, the results before it
    are yielded first. The model is one that `may_launch_ahead`, with all blocks on this host.
    """
    last = _last_modules(model)
    runs_ahead = [RunAhead(home, last) for _ in range(n_ahead)]
    launches = (
        (_launch(model, run, item, slot), slot)
        for item, slot in zip(items, itertools.cycle(runs_ahead))
    )
    launched = deque[tuple[Result, RunAhead]]()
    errors: list[Exception] = []
    try:
        while True:
            try:
                launched.extend(itertools.islice(launches, n_ahead - len(launched)))
            except Exception as error:  # noqa: BLE001  # raised after the results before it
                errors.append(error)
            if not launched:
                break
            # Do not bind the result: a name would keep it alive during the next run.
            yield _join_result(*launched.popleft())
    finally:
        for each in runs_ahead:  # also after errors, and if results were not fetched
            each.join()
    if errors:
        raise errors.pop()


def _last_modules(model: Model) -> frozenset[nn.Module]:
    """Return the modules after the blocks, or none of them if any contains a user's module."""
    last = [getattr(model, name) for name in ("ln_final", "unembed") if hasattr(model, name)]
    users = (is_of_user(type(each)) for module in last for each in module.modules())
    return frozenset() if any(users) else frozenset(last)


def _launch(
    model: Model, run: Callable[[Model, Item], Result], item: Item, ahead: RunAhead
) -> Result:
    loss_fn = partial(_loss, model.loss_fn)
    with removing_hooks(), ahead, launching(ahead), replaced_loss(model, loss_fn):
        return run(model, item)


def _join_result(result: Result, ahead: RunAhead) -> Result:
    ahead.join(tensors_in(result))
    return result


def _loss(
    loss_fn: Callable[..., torch.Tensor], logits: torch.Tensor, *args: object, **kwargs: object
) -> torch.Tensor:
    """Call `loss_fn`; tokens and masks keep their memory until the current stream has read them."""
    stream = torch.get_device_module(logits.device.type).current_stream(logits.device)
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.device == logits.device:
            value.record_stream(stream)
    return loss_fn(logits, *args, **kwargs)


@contextlib.contextmanager
def replaced_loss(model: Model, loss_fn: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Give a model another `loss_fn` within a `with` block."""
    attributes, own = vars(model), vars(model).get("loss_fn")
    attributes["loss_fn"] = loss_fn
    try:
        yield
    finally:
        del attributes["loss_fn"]
        if own is not None:
            attributes["loss_fn"] = own

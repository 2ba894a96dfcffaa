"""The devices in use: those of live models, and that of `gather_on`."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TypeVar

import torch

from tl_devicefix.placement.devices import DeviceLike, resolve
from tl_devicefix.placement.placement import Placement

Value = TypeVar("Value")
_chosen: ContextVar[torch.device | None] = ContextVar("gather_on", default=None)
# Keys are ids, since two placements may be equal. The oldest comes first.
_in_use: weakref.WeakValueDictionary[int, Placement] = weakref.WeakValueDictionary()


@contextlib.contextmanager
def gather_on(device: DeviceLike) -> Iterator[None]:
    """Read weights and caches on `device` instead of at home, within a `with` block.

    It applies to stacked weights (`model.W_in`, `model.OV`), `model.W_E` and `model.W_U`, cached
    activations, and TransformerLens's results from them. Use it where home is too small: the
    stacked `W_in` of a 70B model is 37 GB. You get copies, so changing them does not change the
    model. It applies to a model on one device too, and in this thread (or task) only.

    Args:
        device: usually "cpu". An index counts devices of the type that TransformerLens chooses.

    Yields:
        Nothing.

    Raises:
        ValueError: if there is no such device.

    >>> with gather_on("cpu"):  # doctest: +SKIP
    ...     norms = model.W_in.norm(dim=(1, 2))
    """
    with setting(_chosen, resolve(device)):
        yield


@contextlib.contextmanager
def setting(variable: ContextVar[Value], value: Value) -> Iterator[None]:
    """Set a context variable within a `with` block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def chosen_device() -> torch.device | None:
    """Return the device of the innermost `gather_on`, if any."""
    return _chosen.get()


def use(placement: Placement) -> None:
    """Count a placement's devices as in use, as long as a model (or anyone) holds it."""
    _in_use.pop(id(placement), None)
    _in_use[id(placement)] = placement


def devices_in_use(beside: torch.device | None = None) -> frozenset[torch.device]:
    """Return the devices of all placed models (and of their weights), and of `gather_on`.

    With `beside`, only models that use this device count.
    """
    memories = (placement.here.memories for placement in placements_in_use())
    devices = frozenset(d for own in memories if beside is None or beside in own for d in own)
    chosen = chosen_device()
    return devices if chosen is None else devices | {chosen}


def device_of_result(devices: frozenset[torch.device]) -> torch.device:
    """Return the device for the result of mixing tensors of these devices.

    The first rule that applies decides:

    1. the device of `gather_on`;
    2. the home of the model that uses most of the devices, the latest one if several do;
    3. without any model: one of the devices.
    """
    if (chosen := chosen_device()) is not None:
        return chosen
    latest_first = placements_in_use()[::-1]
    if not latest_first:
        return min(devices, key=str)
    return max(latest_first, key=lambda its: len(devices.intersection(its.memories))).home


def placements_in_use() -> list[Placement]:
    """Return the placements that anybody holds, oldest first."""
    # `values()` would fail if another thread places a model meanwhile.
    references = (reference() for reference in _in_use.valuerefs())
    return [placement for placement in references if placement is not None]

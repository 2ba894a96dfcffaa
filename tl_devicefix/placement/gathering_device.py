"""`gather_on`: the device on which what is spread is read together, where home has no room."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch

from tl_devicefix.placement.devices import DeviceLike, numbered_or_resolved, resolve

_chosen: ContextVar[DeviceLike | None] = ContextVar("gather_on", default=None)


@contextlib.contextmanager
def gather_on(device: DeviceLike) -> Iterator[None]:
    """Within it, what is gathered from several devices is read on `device` instead of home.

    That is stacked weights (`model.W_in`, `model.OV`), `model.W_E` and `model.W_U`, cached
    activations, and what TransformerLens computes from them. For what home has no room for: the
    stacked `W_in` of a 70B model is 37 GB. What is read is a copy: changing it does not change the
    model. A model on one device is read there too. It holds in this thread (or task) only.

    Args:
        device: usually "cpu". An index is that of a device of the type that a model's home has.

    Raises:
        ValueError: if there is no such device.

    >>> with gather_on("cpu"):  # doctest: +SKIP
    ...     norms = model.W_in.norm(dim=(1, 2))
    """
    with _choosing(numbered_or_resolved(device)):
        yield


def gather_nowhere() -> contextlib.AbstractContextManager[None]:
    """Within it, an outer `gather_on` is not in force."""
    return _choosing(None)


@contextlib.contextmanager
def _choosing(device: DeviceLike | None) -> Iterator[None]:
    token = _chosen.set(device)
    try:
        yield
    finally:
        _chosen.reset(token)


def chosen_device(home: torch.device | None) -> torch.device | None:
    """The device of the innermost `gather_on`, if any.

    Args:
        home: of what is gathered, whose type an index has.

    Raises:
        ValueError: if there is no such device of that type.
    """
    device = _chosen.get()
    return None if device is None else resolve(device, home)

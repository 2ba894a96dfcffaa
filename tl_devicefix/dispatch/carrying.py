"""Bring what a component takes or returns to a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from tl_devicefix.dispatch.joining import mapped
from tl_devicefix.dispatch.scheduler import current_run


def move(value: Any, device: torch.device) -> Any:
    """Bring a tensor to a device; leave anything else alone."""
    if isinstance(value, torch.Tensor) and value.device != device:
        run = current_run()
        return value.to(device) if run is None else run.send(value, device)
    return value


def bring_home(output: Any, home: torch.device) -> Any:
    """Bring a tensor, or the tensors in what a component returns, to the home device."""
    if isinstance(output, torch.Tensor):
        return move(output, home)
    return mapped(output, lambda part: bring_home(part, home))


_unread = ContextVar("_unread", default=False)


@contextmanager
def outputs_unread() -> Iterator[None]:
    """Within it, nobody reads what a model returns, so it stays where it was computed."""
    token = _unread.set(True)
    try:
        yield
    finally:
        _unread.reset(token)


def is_output_read() -> bool:
    """Whether somebody may read what a model returns, which is at home then."""
    return not _unread.get()

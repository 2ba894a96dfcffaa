"""Values that are computed once per forward and shared by its blocks: masks, positions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
from contextvars import ContextVar
from typing import Any, TypeVar

import torch

from tl_devicefix.placement.devices import module_with_streams, version_of
from tl_devicefix.placement.in_use import setting

Made = TypeVar("Made")
_this_forward: ContextVar[dict[object, Any] | None] = ContextVar(
    "tl_devicefix_forward", default=None
)
FACTS = "facts"
"""The key of facts that are sent to other hosts, which need them to run blocks of this forward."""


def one_forward(facts: object = None) -> contextlib.AbstractContextManager[None]:
    """Return a context with one `forward_cache`, in which `facts` are stored."""
    return setting(_this_forward, dict[object, Any]({} if facts is None else {FACTS: facts}))


def forward_cache() -> dict[object, Any]:
    """Return the dict of this thread's forward; outside of one, an empty dict."""
    kept = _this_forward.get()
    return {} if kept is None else kept


def is_in_forward() -> bool:
    """Return True in a forward of a model, also in its hooks."""
    return _this_forward.get() is not None


def cached_for_forward(
    of: tuple[torch.Tensor | None, ...],
    what: Hashable,
    device: torch.device,
    make: Callable[[], Made],
) -> Made:
    """Return a value that `make` computes from some tensors, once per forward.

    `what` is everything else that it depends on. Each stream computes its own: it would not wait
    for another's. The value is computed again if one of the tensors was modified in place, except
    inference tensors, which do not count that.
    """
    cache, key = forward_cache(), (what, device, _stream_of(device), *map(state_of, of))
    if key not in cache:
        cache[key] = of, make()  # keep `of` alive: the key has its tensors' ids
    made: Made = cache[key][1]
    return made


def _stream_of(device: torch.device) -> Hashable:
    """Return this thread's current stream on a device; None if it has no streams."""
    streams = module_with_streams(device)
    return None if streams is None else streams.current_stream(device)


def state_of(tensor: torch.Tensor | None) -> tuple[int, int | None] | None:
    """Return a tensor's id and version; None for no tensor."""
    return None if tensor is None else (id(tensor), version_of(tensor))

"""Values that are computed once in a forward and shared by its blocks: masks, positions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
from contextvars import ContextVar
from typing import Any, TypeVar

import torch

from tl_devicefix.placement.devices import module_with_streams
from tl_devicefix.placement.in_use import setting

Made = TypeVar("Made")
_this_forward: ContextVar[dict[Any, Any] | None] = ContextVar("tl_devicefix_forward", default=None)


FACTS = "facts"
"""What is kept of a forward for the blocks that other hosts run of it."""


def one_forward(*facts: Any) -> contextlib.AbstractContextManager[None]:
    """Within it, `kept_in_forward` is one dict, which begins with `facts` by their classes."""
    return setting(_this_forward, {type(fact): fact for fact in facts})


def kept_in_forward() -> dict[Any, Any]:
    """What this thread's forward keeps; a new dict outside of one, as where a block is called."""
    kept = _this_forward.get()
    return {} if kept is None else kept


def is_in_forward() -> bool:
    """Return True in a forward of a model, also in its hooks."""
    return _this_forward.get() is not None


def made_once(
    of: tuple[torch.Tensor | None, ...],
    what: Hashable,
    device: torch.device,
    make: Callable[[], Made],
) -> Made:
    """Make something of some tensors on a device, once in a forward.

    It is made again if one of them is changed, and for another stream of the device, which does not
    wait for this one, as where a hook runs a block on a stream of its own. `what` is all else that
    it depends on. The tensors are kept, so that no others get their ids.
    """
    kept, key = kept_in_forward(), (what, device, _stream_of(device), *map(state_of, of))
    if key not in kept:
        kept[key] = of, make()
    made: Made = kept[key][1]
    return made


def _stream_of(device: torch.device) -> Any:
    """The stream on which this thread computes; None of a device without streams."""
    if device.type == "cpu":
        return None
    streams = module_with_streams(device)
    return None if streams is None else streams.current_stream(device)


def state_of(tensor: torch.Tensor | None) -> tuple[int, int | None] | None:
    """A tensor's identity, and how often it was changed; that is not counted in inference mode."""
    if tensor is None:
        return None
    return id(tensor), None if tensor.is_inference() else tensor._version

"""What blocks know of the forward that they are in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import NamedTuple


class ThisForward(NamedTuple):
    """A forward, as its caller knows it; by default, it is not a Bridge's."""

    is_of_bridge: bool = False
    """What transformers records of it goes to nobody."""
    may_pad: bool = False
    attends_by_sdpa: bool = False


this_forward: ContextVar[ThisForward] = ContextVar(
    "tl_devicefix_bridge_forward",
    default=ThisForward(),  # noqa: B039, as it is a tuple
)


@contextlib.contextmanager
def within(forward: ThisForward) -> Iterator[None]:
    """Within it, this is the thread's forward."""
    token = this_forward.set(forward)
    try:
        yield
    finally:
        this_forward.reset(token)

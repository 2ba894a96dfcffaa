"""What is known of tensors' values, and made of them, found out once for all blocks of a forward.

Each question waits for a device, and each mask is as large as the scores of one head.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch.utils.weak import WeakIdKeyDictionary

from tl_devicefix.simulation.tensor import has_values

F = TypeVar("F")


class _Forward:
    """A forward that is under way, and what was made in it."""

    def __init__(self) -> None:
        self.made: dict[Hashable, Any] = {}
        # A block's own copy of a mask is not held by what is made of it.
        self.made_of = WeakIdKeyDictionary()
        # What tensors remember it by: itself, which holds them, would keep them forever.
        self.name = object()


_this_forward: ContextVar[_Forward | None] = ContextVar("tl_devicefix_forward", default=None)


@contextlib.contextmanager
def one_forward() -> Iterator[None]:
    """Within it, users' masks stay as they are but for changes that torch counts.

    Those of inference mode, through `.data` and through numpy are not counted.
    """
    token = _this_forward.set(_Forward())
    try:
        yield
    finally:
        _this_forward.reset(token)


def made_once(of: torch.Tensor | None, what: Hashable, make: Callable[[], F]) -> F:
    """What is made of a tensor, or of none: once in a forward, for as long as it is not changed."""
    forward = _this_forward.get()
    if forward is None:
        return make()
    made: dict[Hashable, F] = forward.made if of is None else forward.made_of.setdefault(of, {})
    key = None if of is None or of.is_inference() else of._version, what
    if key not in made:
        made[key] = make()
    return made[key]


def known(
    tensor: torch.Tensor, what: Hashable, find_out: Callable[[torch.Tensor], F], in_rehearsal: F
) -> F:
    """A fact about a tensor's values, found out once for as long as it is not changed.

    In a rehearsal there are none: masks are taken for causal ones, that leave nothing out.
    """
    if tensor.is_inference():
        return known_of_users(tensor, what, find_out, in_rehearsal)
    return _known_as(tensor._version, tensor, what, find_out, in_rehearsal)


def known_of_users(
    tensor: torch.Tensor, what: Hashable, find_out: Callable[[torch.Tensor], F], in_rehearsal: F
) -> F:
    """A fact about a tensor's values, found out once in a forward, for as long."""
    forward = _this_forward.get()
    name = object() if forward is None else forward.name
    state = name, None if tensor.is_inference() else tensor._version
    return _known_as(state, tensor, what, find_out, in_rehearsal)


def _known_as(
    state: object,
    tensor: torch.Tensor,
    what: Hashable,
    find_out: Callable[[torch.Tensor], F],
    in_rehearsal: F,
) -> F:
    if not has_values(tensor):
        return in_rehearsal
    found: dict[Hashable, tuple[object, F]] = _found_out.setdefault(tensor, {})
    if what not in found or found[what][0] != state:
        found[what] = state, find_out(tensor)
    return found[what][1]


# Not on the tensors: copies of them, and what is saved of them, would take it along.
_found_out = WeakIdKeyDictionary()

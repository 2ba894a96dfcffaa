"""Views of a model: the same weights, with hook points, hooks and hook contexts of their own.

Runs that are in flight together each have a view, so that no hook of one is seen by another.
"""

from __future__ import annotations

from operator import is_
from typing import Any

import torch
from torch import nn

from tl_devicefix.running.twins import Twins, contents_of, refill

_AS_MADE = "_tl_devicefix_as_made"
_TENSORS = frozenset((torch.Tensor, nn.Parameter))


def view_of(model: Any, twins: Twins) -> Any:
    """A view of a model: a model of the same class with the same weights, and modules of its own.

    Parameters, buffers, config, placement, tokenizer and whatever else holds no module are the
    same objects. The model's hooks are there, in their order, and get the view's hook points;
    a hook that was added with a closure over the model has the view there. No `__init__` is called.

    Args:
        model: of either class, on whatever devices.
        twins: new; afterwards, what belongs to the view.
    """
    view = twins.of(model)
    vars(view).pop(_AS_MADE, None)  # of a model that is a view
    vars(view)[_AS_MADE] = _AsMade(view, twins)
    return view


def is_view(model: Any) -> bool:
    """Whether the model is a view of another."""
    return vars(model).get(_AS_MADE) is not None  # it is None in a copy


def restore(view: Any) -> None:
    """Bring a view back to what it was when it was made: modules, hooks, contexts, attributes.

    Values of weights, the config and what else it shares with the model are left as they are.

    Raises:
        ValueError: if it is no view.
    """
    if not is_view(view):
        raise ValueError(f"a {type(view).__name__} that is no view cannot be restored: give a view")
    vars(view)[_AS_MADE].restore(view)


class _AsMade:
    """What a view was like when it was made.

    Args:
        view: it does not hold it, so that a view is gone when it is dropped.
        twins: its parts.
    """

    def __init__(self, view: Any, twins: Twins) -> None:
        self._of_view = dict(vars(view))
        self._held = [vars(holder) for holder in twins.holders if holder is not view]
        self._as_made = [dict(held) for held in self._held]
        self._empty = [each for each in twins.containers if not each]
        self._filled = [(each, contents_of(each)) for each in twins.containers if each]

    def restore(self, view: Any) -> None:
        """Bring it back."""
        for container in filter(None, self._empty):
            container.clear()
        for container, contents in self._filled:
            now = contents_of(container)
            if len(now) != len(contents) or not all(map(is_, now, contents)):
                refill(container, contents)
        _put_back(vars(view), self._of_view)
        for held, as_made in zip(self._held, self._as_made):
            if not _is_as_made(held, as_made):
                _put_back(held, as_made)

    # A copy of a view, and a view of one, has nothing to be restored to.

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()


def _is_as_made(held: dict[str, Any], as_made: dict[str, Any]) -> bool:
    """Whether attributes are the same objects, or equal, such as another empty list of hooks."""
    if as_made.get("ctx") or not _TENSORS.isdisjoint(map(type, as_made.values())):
        return False  # to compare tensors is to compute, and to wait
    try:
        return held == as_made
    except (RuntimeError, ValueError):  # tensors and arrays do not say whether they are equal
        return False


def _put_back(held: dict[str, Any], as_made: dict[str, Any]) -> None:
    held.update(as_made)
    for name in held.keys() - as_made.keys() - {_AS_MADE}:
        del held[name]

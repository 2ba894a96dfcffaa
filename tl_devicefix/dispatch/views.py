"""Views of a model: the same weights, with hook points, hooks and hook contexts of their own.

Runs that are in flight together each have a view, so that no hook of one is seen by another.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from tl_devicefix.dispatch.twins import Twins, contents_of, refill

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
    RemovableHandle.next_id += 1  # as if the hooks that are back had been registered


class _AsMade:
    """What a view was like when it was made.

    Args:
        view: it does not hold it, so that a view is gone when it is dropped.
        twins: its parts.
    """

    def __init__(self, view: Any, twins: Twins) -> None:
        self._of_view = dict(vars(view))
        self._empty = [each for each in twins.containers if not each]
        held, of_holders = _apart(vars(each) for each in twins.holders if each is not view)
        filled, of_containers = _apart(filter(None, twins.containers))
        self._comparable = _Together([*of_holders, *of_containers])
        self._held = [(each, dict(each)) for each in held]
        self._filled = [(each, contents_of(each)) for each in filled]

    def restore(self, view: Any) -> None:
        """Bring it back."""
        for container in filter(None, self._empty):
            container.clear()
        self._comparable.restore()
        for container, contents in self._filled:
            now = contents_of(container)
            if len(now) != len(contents) or not all(map(is_, now, contents)):
                refill(container, contents)
        _put_back(vars(view), self._of_view)
        for held, as_made in self._held:
            _put_back(held, as_made)

    # A copy of a view, and a view of one, has nothing to be restored to.

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()


class _Together:
    """Many dicts, lists and sets, and what they were: compared all at once, as that is quick.

    Another empty list of hooks, as TransformerLens makes when it removes hooks, is no difference.

    Args:
        containers: without tensors, as to compare these is to compute, and to wait.
    """

    def __init__(self, containers: list[Any]) -> None:
        self._containers = containers
        self._as_made = list(map(copy.copy, containers))

    def restore(self) -> None:
        """Bring back those that have been changed."""
        if _equal(self._containers, self._as_made):
            return
        for container, as_made in zip(self._containers, self._as_made):
            if not _equal(container, as_made):
                refill(container, contents_of(as_made))


def _equal(now: Any, as_made: Any) -> bool:
    try:
        return bool(now == as_made)
    except (RuntimeError, ValueError):  # tensors and arrays do not say whether they are equal
        return False


def _apart(containers: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Those with tensors, and those without."""
    with_tensors: list[Any] = []
    without: list[Any] = []
    for each in containers:
        values = each.values() if isinstance(each, dict) else each
        (without if _TENSORS.isdisjoint(map(type, values)) else with_tensors).append(each)
    return with_tensors, without


def _put_back(held: dict[str, Any], as_made: dict[str, Any]) -> None:
    held.update(as_made)
    for name in held.keys() - as_made.keys() - {_AS_MADE}:
        del held[name]

"""Views of a model: the same weights, with hook points, hooks and hook contexts of their own.

Runs that are in flight together each have a view, so that no hook of one is seen by another. Its
modules are counterparts of the model's: of the same class, with the same tensors. What a module
holds is the same object in its counterpart, but for what is a module's own (its hooks, its dicts of
parameters, buffers and children) and for what leads to a module of the model: a list, a bound
method, a closure. That leads to the counterpart.
"""

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformer_lens.hook_points import HookPoint, LensHandle

from tl_devicefix.dispatch.mixing import HookAcrossDevices
from tl_devicefix.monkeypatch.patch import LIBRARIES
from tl_devicefix.offload.visiting import OffloadedForward

_AS_MADE = "_tl_devicefix_as_made"
LOOK = "_tl_devicefix_look"
"""Where facts about a block are noted, which tell by themselves whether they still hold."""


def view_of(model: Any, builder: ViewBuilder | None = None) -> Any:
    """A view of a model: a model of the same class with the same weights, and modules of its own.

    Parameters, buffers, config, placement, tokenizer and whatever else holds no module are the
    same objects. The model's hooks are there, in their order, and get the view's hook points;
    a hook that was added with a closure over the model has the view there. No `__init__` is called.
    A new `builder` has afterwards what belongs to the view.
    """
    builder = ViewBuilder() if builder is None else builder
    view = builder.of(model)
    vars(view).pop(_AS_MADE, None)  # of a model that is a view
    vars(view)[_AS_MADE] = _AsMade(view, builder)
    return view


def restore(view: Any) -> None:
    """Bring a view back to what it was when it was made: modules, hooks, contexts, attributes.

    Values of weights, the config and what else it shares with the model are left as they are.
    """
    vars(view)[_AS_MADE].restore(view)


class _AsMade:
    """What a view was like when it was made; it does not hold the view, which would live on."""

    def __init__(self, view: Any, builder: ViewBuilder) -> None:
        self._of_view = dict(vars(view))
        others = [vars(holder) for holder in builder.holders if holder is not view]
        self._others = [(attributes, dict(attributes)) for attributes in others]
        self._empty = [container for container in builder.containers if not container]  # most are
        self._filled = [(each, contents_of(each)) for each in builder.containers if each]

    def restore(self, view: Any) -> None:
        """Bring it back."""
        if any(self._empty):
            for container in self._empty:
                container.clear()
        for container, contents in self._filled:
            now = contents_of(container)
            if len(now) != len(contents) or not all(map(is_, now, contents)):
                refill(container, contents)
        for attributes, as_made in [(vars(view), self._of_view), *self._others]:
            attributes.update(as_made)
            if len(attributes) > len(as_made):
                for name in attributes.keys() - as_made.keys() - {_AS_MADE, LOOK}:
                    del attributes[name]

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of a view, and a view of one, has nothing to be restored to."""


_PLAIN = frozenset(
    (
        *(str, int, float, bool, bytes, complex, type(None), type, frozenset),
        *(torch.dtype, torch.device, torch.Size, torch.Tensor, nn.Parameter),
        types.BuiltinFunctionType,
    )
)
_CONTAINERS = frozenset((dict, OrderedDict, list, set))
_CALLABLES = frozenset((types.FunctionType, types.MethodType, functools.partial))

_LIBRARIES = (*LIBRARIES, "sae_lens")
_WITH_STATE = (
    *("transformer_lens.hook_points", "transformer_lens.model_bridge"),
    *("transformer_lens.conversion_utils", "accelerate.hooks", "torch.nn.modules.module"),
    *(
        "tl_devicefix.dispatch",
        "tl_devicefix.offload",
        "tl_devicefix.hooked_transformer",
        "tl_devicefix.transformer_bridge",
    ),
    "tl_devicefix.simulation.backward",
)
"""Where the classes are of which a model's modules hold objects that know modules or the run."""
_OF_USERS = (LensHandle, HookAcrossDevices)
"""What holds a user's hook, beside classes that say so by `holds_users_hook`."""
_OF_MODULES = frozenset(
    name for name, value in vars(nn.Module()).items() if type(value) in _CONTAINERS
)
_OF_HOOK_POINTS = frozenset(("fwd_hooks", "bwd_hooks", "ctx"))


class ViewBuilder:
    """Makes the counterparts in one view: of a model's modules, and of what else it needs its own.

    In a function's closure or a partial's arguments, and in a user's hook, only modules of the
    model are exchanged: what else a user put there is the user's, such as a list of results.
    """

    def __init__(self) -> None:
        self.holders: list[Any] = []
        """Those of what has attributes: modules, and objects such as a Bridge's conversions."""
        self.containers: list[Any] = []
        """Dicts, lists and sets of their own."""
        self._counterparts: dict[int, Any] = {}
        # What is still to be filled: modules before callables, which exchange known modules only.
        self._holders: list[tuple[type, dict[str, Any]]] = []
        self._contents: list[tuple[Any, Any]] = []
        self._callables: list[tuple[dict[str, Any], str, Any]] = []
        self._handles: list[tuple[RemovableHandle, RemovableHandle]] = []
        self._visits: list[tuple[OffloadedForward, OffloadedForward]] = []

    def of(self, model: nn.Module) -> Any:
        """The counterpart of a model, complete."""
        counterpart = self(model)
        while self._holders or self._callables or self._contents:
            if self._holders:
                self._fill(*self._holders.pop())
            elif self._callables:
                attributes, name, value = self._callables.pop()
                attributes[name] = self(value)
            else:
                self._fill_container(*self._contents.pop())
        for handle, its_counterpart in self._handles:
            its_counterpart.__setstate__(self._state(handle))
        for visits, in_view in self._visits:
            visits.leave_to(in_view)
        return counterpart

    def counterpart_of(self, value: Any) -> Any:
        """The counterpart of a value that has one; the value if it has none."""
        return self._counterparts.get(id(value), value)

    def __call__(self, value: Any) -> Any:
        """What a view has in a value's place: its counterpart, or the value."""
        kind: type = type(value)
        if kind in _PLAIN:
            return value
        counterpart = self._counterparts.get(id(value))
        if counterpart is not None:
            return counterpart
        return _rule(kind)(self, value)

    def _deep_copy(self, value: Any) -> Any:
        counterpart = self._counterparts[id(value)] = copy.deepcopy(value)
        return counterpart

    def _holder(self, value: Any) -> Any:
        kind = type(value)
        counterpart = self._counterparts[id(value)] = object.__new__(kind)
        attributes = dict(vars(value))
        attributes.pop(LOOK, None)  # the view's modules are looked at for themselves
        object.__setattr__(counterpart, "__dict__", attributes)
        self._holders.append((kind, attributes))
        self.holders.append(counterpart)
        return counterpart

    def _fill(self, kind: type, attributes: dict[str, Any]) -> None:
        """Exchange what a counterpart holds."""
        for name, value in attributes.items():
            its_kind = type(value)
            if its_kind in _PLAIN:
                continue
            if its_kind in _CONTAINERS and _is_own(kind, name):
                attributes[name] = self._own(value)
                if name == "_modules" and value:
                    self._fill_container(*self._contents.pop())
            elif its_kind in _CALLABLES:
                self._callables.append((attributes, name, value))
            elif kind in _OF_USERS or getattr(kind, "holds_users_hook", False):
                attributes[name] = self._in_function(value)
            else:
                attributes[name] = self(value)

    def _own(self, value: Any) -> Any:
        """A container that the counterpart has its own of, whatever is in it."""
        counterpart = self._counterparts.get(id(value))
        if counterpart is None:
            counterpart = self._counterparts[id(value)] = type(value)()
            self.containers.append(counterpart)
            if value:
                self._contents.append((value, counterpart))
        return counterpart

    def _fill_container(self, value: Any, counterpart: Any) -> None:
        refill(counterpart, list(map(self, contents_of(value))))

    def _container(self, value: Any) -> Any:
        """A container that leads to what has a counterpart, of its own; any other is shared."""
        self._counterparts[id(value)] = value  # a container within itself
        parts = contents_of(value)
        counterparts = [self(part) for part in parts]
        if all(map(is_, parts, counterparts)):
            return value
        if isinstance(value, tuple):
            counterpart = (
                value._make(counterparts) if hasattr(value, "_make") else type(value)(counterparts)
            )
        else:
            counterpart = copy.copy(value)
            refill(counterpart, counterparts)
            self.containers.append(counterpart)
        self._counterparts[id(value)] = counterpart
        return counterpart

    def _in_function(self, value: Any) -> Any:
        """What a function of a view has in place of a value of its closure or arguments."""
        if isinstance(value, (dict, list, tuple, set)):
            return value
        kind = type(value)
        if issubclass(kind, nn.Module):
            return self.counterpart_of(value)
        return self(value)

    def _function(self, value: Any) -> Any:
        if not value.__closure__ and not vars(value):
            return value
        self._counterparts[id(value)] = value  # a function that calls itself
        cells = tuple(map(self._cell, value.__closure__ or ()))
        attributes = {name: self._in_function(part) for name, part in vars(value).items()}
        unchanged = all(map(is_, cells, value.__closure__ or ()))
        if unchanged and all(map(is_, attributes.values(), vars(value).values())):
            return value
        counterpart = types.FunctionType(
            value.__code__, value.__globals__, value.__name__, value.__defaults__, cells
        )
        counterpart.__kwdefaults__ = value.__kwdefaults__
        counterpart.__annotations__ = value.__annotations__
        counterpart.__qualname__, counterpart.__doc__ = value.__qualname__, value.__doc__
        counterpart.__module__ = value.__module__
        vars(counterpart).update(attributes)
        self._counterparts[id(value)] = counterpart
        return counterpart

    def _cell(self, cell: Any) -> Any:
        """The same cell where it holds no module: functions may share it, and write to it."""
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet
            return cell
        counterpart = self._in_function(value)
        return cell if counterpart is value else types.CellType(counterpart)

    def _method(self, value: Any) -> Any:
        owner = value.__self__
        is_users = isinstance(owner, nn.Module) and not _is_of(type(owner), _LIBRARIES)
        its_counterpart = self.counterpart_of(owner) if is_users else self(owner)
        return (
            value if its_counterpart is owner else types.MethodType(value.__func__, its_counterpart)
        )

    def _partial(self, value: Any) -> Any:
        parts = [value.func, *value.args, *value.keywords.values()]
        counterparts = [self._in_function(part) for part in parts]
        if all(map(is_, parts, counterparts)):
            return value
        n = 1 + len(value.args)
        counterpart = type(value)(*counterparts[:n], **dict(zip(value.keywords, counterparts[n:])))
        vars(counterpart).update(
            (name, self._in_function(part)) for name, part in vars(value).items()
        )
        return counterpart

    def _handle(self, value: RemovableHandle) -> RemovableHandle:
        counterpart = self._counterparts[id(value)] = object.__new__(type(value))
        self._handles.append((value, counterpart))
        return counterpart

    def _state(self, handle: RemovableHandle) -> Any:
        """A handle's state, as torch has it pickled, of the counterpart's hooks."""
        hooks, number, *others = handle.__getstate__()
        extra = tuple(map(self.counterpart_of, others[0])) if others else ()
        return self.counterpart_of(hooks), number, extra

    def _proxy(self, value: Any) -> Any:
        referent = value.__repr__.__self__  # a proxy hands this on to what it stands for
        return weakref.proxy(self(referent)) if isinstance(referent, nn.Module) else value

    def _visit(self, value: OffloadedForward) -> OffloadedForward:
        counterpart: OffloadedForward = self._holder(value)
        self.holders.pop()  # at rest it is always the same
        self._visits.append((value, counterpart))
        return counterpart


@functools.lru_cache(maxsize=4096)
def _is_own(kind: type, name: str) -> bool:
    """Whether each object of a class has a container of its own by this name.

    Of modules: what torch and TransformerLens keep hooks in, and what is private to a library.
    """
    return (
        not issubclass(kind, nn.Module)
        or name in _OF_MODULES
        or (issubclass(kind, HookPoint) and name in _OF_HOOK_POINTS)
        or (_is_of(kind, _LIBRARIES) and name.startswith("_"))
    )


def contents_of(container: Any) -> list[Any]:
    """What is in a container; of a dict, the keys and then the values."""
    return [*container, *container.values()] if isinstance(container, dict) else [*container]


def refill(container: Any, contents: list[Any]) -> None:
    """Have these contents in a dict, list or set, and no others."""
    container.clear()
    if isinstance(container, dict):
        n = len(contents) // 2
        container.update(zip(contents[:n], contents[n:]))
    elif isinstance(container, set):
        container.update(contents)
    else:
        container.extend(contents)


def _same(builder: ViewBuilder, value: Any) -> Any:
    return value


_RULES: dict[type, Callable[[ViewBuilder, Any], Any]] = {
    types.FunctionType: ViewBuilder._function,
    types.MethodType: ViewBuilder._method,
    functools.partial: ViewBuilder._partial,
    RemovableHandle: ViewBuilder._handle,
    weakref.ProxyType: ViewBuilder._proxy,
    weakref.CallableProxyType: ViewBuilder._proxy,
    OffloadedForward: ViewBuilder._visit,
}


@functools.lru_cache(maxsize=4096)
def _rule(kind: type) -> Callable[[ViewBuilder, Any], Any]:
    """What becomes of a value of a class."""
    if kind in _RULES:
        return _RULES[kind]
    if issubclass(kind, nn.Module):
        return ViewBuilder._holder
    if issubclass(kind, (dict, list, tuple, set)):
        return ViewBuilder._container
    is_frozen = getattr(getattr(kind, "__dataclass_params__", None), "frozen", False)
    if not _is_of(kind, _WITH_STATE) or issubclass(kind, (type, Enum)) or is_frozen:
        return _same
    if hasattr(kind, "__deepcopy__"):
        return ViewBuilder._deep_copy
    return ViewBuilder._holder if hasattr(kind, "__dict__") else _same


def _is_of(kind: type, packages: tuple[str, ...]) -> bool:
    """Whether a class is of one of these packages."""
    return f"{kind.__module__}.".startswith(tuple(f"{package}." for package in packages))

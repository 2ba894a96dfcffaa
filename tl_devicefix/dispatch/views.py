"""Views of a model: the same weights, but separate hook points, hooks and hook contexts.

Each run in flight has its own view, so that no run sees another's hooks. Each module has a
counterpart in the view, of the same class, with the same tensors:

    module.W_Q, module.cfg          the same objects
    ._state_dict_hooks              the same dict, if it is empty
    module._modules, ._forward_hooks, .fwd_hooks
                                    the counterpart's own dicts and lists
    lists, methods and handles that refer to a module; a library's closures
                                    rebuilt to refer to its counterpart
    a function, partial or object of the user's that refers to a module
                                    the same object, and `is_captured` is True
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from operator import is_, itemgetter
from typing import Any, Generic, SupportsIndex, TypeVar

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils.hooks import RemovableHandle
from transformer_lens.hook_points import HookPoint, LensHandle

from tl_devicefix.around import AroundForward
from tl_devicefix.dispatch.naming import each_module
from tl_devicefix.dispatch.scheduler import encode_in_turn
from tl_devicefix.dispatch.user_modules import WATCH, move_in_parts
from tl_devicefix.fusing.fused import BOUND
from tl_devicefix.fusing.listening import HOOKS, IN_VIEW, count_assignment, count_hook
from tl_devicefix.monkeypatch.patch import LIBRARIES, is_of_user, package_of, patches

Module = TypeVar("Module", bound=nn.Module)


class View(Generic[Module]):
    """A view of a model: of the same class, with the same weights and its own modules.

    Parameters, buffers, config, placement and whatever else holds no module are the same objects;
    the tokenizer is a copy. A view has the model's hooks, in their order, and calls them with its
    own hook points. No `__init__` is called. `builder` knows the counterparts afterwards.

    Attributes:
        model: the view itself.
        hooked: the attributes of the hook points that had hooks when the view was made.
        is_captured: True if a function, partial or object of the user's, in a hook or attribute of
            the model, holds one of its modules: in a run, it would use that, not the view's.
    """

    def __init__(self, viewed: Module, builder: ViewBuilder | None = None) -> None:
        builder = ViewBuilder() if builder is None else builder
        if WATCH in vars(viewed):
            model: Any = viewed
            move_in_parts(model, model.placement.here)
        with _no_garbage_collection():
            self.model: Module = builder.of(viewed)
        self.is_captured = builder.is_captured
        self._tokenizers: list[tuple[object, dict[str, object]]] = []
        for name in ("tokenizer", "_tokenizer"):  # of a HookedTransformer; of a Bridge
            tokenizer = vars(self.model).get(name)
            if getattr(tokenizer, "is_fast", False):  # others share nothing
                own = vars(self.model)[name] = copy.copy(tokenizer)
                kind: type = type(tokenizer)
                own.__class__ = _encoding_in_turn(kind)
                self._tokenizers.append((own, dict(vars(own))))
        self._changed, self._states = builder.changed, builder.states
        # Attributes that runs add or replace are found by comparison with these.
        for state in self._states:
            state.as_made = dict(state.attributes)
        self._undone: str | None = None  # what a run set, and `restore` has undone
        self._begin()
        self._always = [s for n, s in enumerate(self._states) if n == 0 or s.is_hooked]
        for state in self._always:
            state.note_contents()
        self.hooked = [state.attributes for state in self._always if state.is_hooked]
        self._config = getattr(viewed, "cfg", None)
        self._settings = dict(vars(self._config)) if self._config else {}

    def restore(self) -> None:
        """Undo what a run changed: hooks, contexts, modules, and the attributes of the view itself.

        This visits the view itself, and modules that had hooks or whose containers were written to.
        Values of weights, and all else that the view shares with the model, stay as they are. If it
        undoes a weight or an attribute of the view itself, `kept_setting` says so.
        """
        undone = self._states[0].kept_setting()
        # If two modules share a container, the first note of it is what it had: restore that last.
        for state in (*reversed(self._changed), *self._always):
            undone = state.restore() or undone
        self._undone = self._undone or undone
        for tokenizer, made in self._tokenizers:
            vars(tokenizer).clear()
            vars(tokenizer).update(made)
        self._begin()

    def _begin(self) -> None:
        # Filling an OrderedDict calls its `__setitem__`, which notes a change.
        for state in self._changed:
            state.is_noted = False
        self._changed.clear()

    def shared_setting(self) -> str | None:
        """Return the name of a config flag that has changed since the view was made, if any."""
        now = vars(self._config) if self._config else {}
        return next((name for name in now if now[name] is not self._settings.get(name)), None)

    def kept_setting(self) -> str | None:
        """Return the weight, or the attribute of a module, that a run has set, if any.

        This visits all modules: call it once, after all runs.
        """
        # Other objects are TransformerLens's own, such as an OPT's conversions of its activations.
        modules = (s for s in self._states if issubclass(s.kind, nn.Module))
        return self._undone or next(filter(None, (s.kept_setting() for s in modules)), None)


@patches("HookPoint", takes="self", why="a view's hook points keep their contexts")
def clear_context(original: Callable[..., None], self: HookPoint) -> None:
    """Wrap `HookPoint.clear_context`: a view keeps the dict, which notes changes."""
    if IN_VIEW in vars(self):
        self.ctx.clear()
    else:
        original(self)


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Pause the collector: it starts at every 700 new objects, and 80 layers have 100 000."""
    if not gc.isenabled():  # by the user, or by another thread here, which enables it again
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@functools.lru_cache
def _encoding_in_turn(kind: type) -> type:
    """Return a subclass of a tokenizer's class that encodes texts while it holds the lock."""

    def in_turn(name: str) -> Callable[..., object]:
        return lambda *args, **kwargs: encode_in_turn(getattr(kind, name), *args, **kwargs)

    methods = filter(functools.partial(hasattr, kind), ("_encode_plus", "_batch_encode_plus"))
    return type(kind.__name__, (kind,), {name: in_turn(name) for name in methods})


class _State:
    """A counterpart's attributes when its view was made, and its containers' contents.

    Contents are noted only before a run's first change: an 80-layer model has 20 000 empty
    containers.

    Attributes:
        is_hooked: True for a hook point with hooks, or with something in its context.
        inner: containers within the counterpart's own, which lead to modules.
    """

    __slots__ = (
        *("as_made", "attributes", "changed", "contents", "inner", "is_hooked"),
        *("is_noted", "kind"),
    )

    def __init__(self, kind: type, attributes: dict[str, object], changed: list[_State]) -> None:
        self.kind, self.attributes, self.changed = kind, attributes, changed
        self.as_made = attributes
        self.contents: Sequence[tuple[object, list[object]]] = ()
        self.inner: tuple[object, ...] = ()
        self.is_hooked = self.is_noted = False

    def new(self, kind: type) -> Any:
        """Return an empty container; if it is a dict, it notes the contents before it changes."""
        noting = _NOTING.get(kind)
        if noting is None:
            return kind()
        container = noting()
        container.owner = self
        return container

    def give_own(self, name: str, container: type) -> None:
        """Replace an empty container that is an attribute."""
        if name in _MODULE_DICTS and issubclass(self.kind, HookPoint):
            self.attributes[name] = {}  # no run may fill it: see `kept_setting`
        else:
            self.attributes[name] = self.new(container)

    def note(self) -> None:
        """Note the contents, before one of them changes for the first time in a run."""
        if not self.is_noted:
            self.is_noted = True
            self.note_contents()
            self.changed.append(self)

    def note_contents(self) -> None:
        """Note what the counterpart's own containers contain now."""
        own = (
            value
            for name, value in self.as_made.items()
            if type(value) in _RESTORED and _is_own(self.kind, name)
        )
        self.contents = [(each, contents_of(each)) for each in (*own, *self.inner)]

    def restore(self) -> str | None:
        """Give the counterpart back what it had; return the name of weights that were replaced."""
        undone = None
        for container, contents in self.contents:
            now = contents_of(container)
            # Compare by identity: `==` of two tensors is a tensor.
            if len(now) != len(contents) or not all(map(is_, now, contents)):
                refill(container, contents)
                if container is self.as_made.get("_parameters"):  # libraries replace buffers
                    undone = f"a parameter of {self.kind.__name__}"
                if container is self.as_made.get("_modules"):
                    count_assignment()
                elif any(container is self.as_made.get(name) for name in HOOKS):
                    count_hook()  # a run may have removed a hook of the model
        if any(self.attributes.get(name) is not self.as_made.get(name) for name in HOOKS):
            count_hook()  # a run has assigned another dict
        for name in self.attributes.keys() - self.as_made.keys() - {BOUND}:
            del self.attributes[name]
        self.attributes.update(self.as_made)
        return undone

    def kept_setting(self) -> str | None:
        """See `View.kept_setting`."""
        made = self.as_made
        # The plain ones of these are a hook point's, made empty; the others note changes.
        if any(each for each in map(made.get, _MODULE_DICTS) if type(each) is dict):
            return "a parameter, buffer or module of HookPoint"
        if len(self.attributes) == len(made) and all(
            map(is_, self.attributes.values(), made.values())
        ):
            return None
        for name, value in self.attributes.items():
            before = made.get(name, _MISSING)
            # Ignore what libraries replace: tables, lists, dicts, None and a forward's wrapper.
            is_replaced = type(before) in _REPLACED or name.startswith("_")
            is_kept = value is before or (is_replaced and name not in HOOKS)
            # `generate` calls `eval()`, which changes nothing: no run in flight has dropout.
            is_eval = name == "training" and value is False
            # `prepend_bos` of a call gives the view a config of its own.
            if not (is_kept or is_eval or name == "cfg"):
                return f"{name} of {self.kind.__name__}"
        return None


# The classes of most values, checked first: these lead to no module.
_PLAIN = frozenset(
    (
        *(str, int, float, bool, bytes, complex, type(None), type, frozenset),
        *(torch.dtype, torch.device, torch.Size, torch.Tensor, nn.Parameter),
        types.BuiltinFunctionType,
    )
)
_CONTAINERS = frozenset((dict, OrderedDict, list, set))
_COLLECTIONS = (dict, list, tuple, set)
_REPLACED = frozenset((*_CONTAINERS, torch.Tensor, type(None), AroundForward))
_MISSING = object()


def _noting(kind: type) -> type:
    """Return a subclass of a dict class that calls `owner.note()` before it changes."""

    def noting(name: str) -> Callable[..., object]:
        original = getattr(kind, name)

        @functools.wraps(original)
        def change(self: Any, *args: object, **kwargs: object) -> object:
            # A Bridge's block pops a name that is not there, in each forward.
            if name != "pop" or args[0] in self:
                self.owner.note()
            return original(self, *args, **kwargs)

        return change

    changes = "__setitem__ __delitem__ __ior__ clear move_to_end pop popitem setdefault update"
    methods: dict[str, Any] = {
        name: noting(name) for name in changes.split() if hasattr(kind, name)
    }
    # A copy of a view's module does not belong to the view.
    methods["__reduce__"] = lambda self: (kind, (), None, None, iter(self.items()))
    methods["copy"] = lambda self: kind(self)
    return type(kind.__name__, (kind,), {"__slots__": ("owner",), **methods})


_NOTING: dict[type, type] = {kind: _noting(kind) for kind in (dict, OrderedDict)}
_RESTORED = frozenset((*_NOTING.values(), list, set))

_KNOWN_LIBRARIES = (*LIBRARIES, "sae_lens")
# Objects of these packages' classes know modules, or keep a run's state, so they get counterparts.
# Other objects in a model are shared: they may be a user's lists of results.
_WITH_STATE = (
    *("transformer_lens.hook_points", "transformer_lens.model_bridge"),
    *("transformer_lens.conversion_utils", "torch.nn.modules.module"),
    *("tl_devicefix.around", "tl_devicefix.dispatch.mixing", "tl_devicefix.fusing"),
    *("tl_devicefix.hooked_transformer", "tl_devicefix.transformer_bridge"),
    *("tl_devicefix.offload", "tl_devicefix.simulation.backward"),
)
_OF_MODULES = frozenset(
    name for name, value in vars(nn.Module()).items() if type(value) in _CONTAINERS
)
_OF_HOOK_POINTS = frozenset(("fwd_hooks", "bwd_hooks", "ctx"))
_MODULE_DICTS = frozenset(("_parameters", "_buffers", "_modules"))
_SHARED_IF_EMPTY = _OF_MODULES - _MODULE_DICTS - {*HOOKS}
"""State-dict hooks, flags by a hook's number, names of buffers that are not saved. With empty ones
of its own, a view would have twice as many objects for the garbage collector to visit."""


_UNUSED = "_tl_devicefix_unused"
_IDENTITY = HookPoint.forward if package_of(HookPoint.forward) == "transformer_lens" else None
_attributes_of = vars(nn.Module)["__dict__"].__get__
"""Like `vars`, without using the hook point."""
_CONVERSION = "hook_conversion"  # of what hooks see
_BLANK = vars(HookPoint())
_EMPTY = _OF_MODULES | _OF_HOOK_POINTS
"""Names of a hook point's containers, which are empty in a blank one."""
_containers_of = itemgetter(*_EMPTY)
_NO_HOOKS = {name: OrderedDict[int, object]() for name in HOOKS}
_first_use = threading.RLock()


def _is_blank(attributes: dict[str, object]) -> bool:
    """Return True for a hook point's attributes if it has no hooks, and nothing of a user's."""
    return attributes.keys() == _BLANK.keys() and not any(_containers_of(attributes))


def _use(point: HookPoint) -> dict[str, Any]:
    """Make a hook point a plain one with its own containers, and return its `__dict__`."""
    attributes = _attributes_of(point)
    with _first_use:  # a run may have threads of its own
        if _UNUSED in attributes:
            states, changed = attributes[_UNUSED]
            attributes[IN_VIEW] = True
            state = _State(HookPoint, attributes, changed)
            for own in _EMPTY - _SHARED_IF_EMPTY:
                state.give_own(own, type(attributes[own]))
            del attributes[_UNUSED]
            state.as_made = dict(attributes)
            states.append(state)
        object.__setattr__(point, "__class__", HookPoint)
    return attributes


class UnusedHookPoint(HookPoint):
    """The counterpart of a blank hook point until its first use, which gives it own containers.

    Hook points are five sixths of a model's modules, and most have no hooks: calling one returns
    its input, and a fused block does not call it. A Bridge reads all names in each run with hooks.
    """

    __module__ = HookPoint.__module__  # it is no user's module
    __dict__ = property(_use)  # type: ignore[assignment]  # setting attributes reads it, too

    def __call__(self, x: torch.Tensor) -> object:
        """Return the input, unless torch has hooks for every module or `forward` was patched."""
        if HookPoint.forward is _IDENTITY and not _has_any_global_hook():
            return x
        return HookPoint.__call__(self, x)

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[object, ...]:
        """Return what makes a copy: a plain hook point."""
        _use(self)
        return HookPoint.__reduce_ex__(self, protocol)


def hooked_points(points: Iterable[HookPoint]) -> list[HookPoint]:
    """Return the hook points that have hooks. A view's unused ones have none, and stay unused."""
    return [
        point
        for point in points
        if type(point) is not UnusedHookPoint and (point.fwd_hooks or point.bwd_hooks)
    ]


def _first_using(name: str) -> property:
    return property(lambda point: _use(point)[name])


for _name in _EMPTY:
    setattr(UnusedHookPoint, _name, _first_using(_name))


class ViewBuilder:
    """Makes the counterparts in one view: of a model's modules, and of what refers to them."""

    def __init__(self) -> None:
        self.states: list[_State] = []
        """A state for each counterpart with attributes: modules, a Bridge's conversions, ..."""
        self.changed: list[_State] = []
        """The states of counterparts whose dicts were written to."""
        self._of_unused = self.states, self.changed  # one tuple for thousands of hook points
        self.is_captured = False
        self._counterparts: dict[int, Any] = {}
        self._of_model: set[int] = set()  # each module's id
        self._to_fill: list[_State] = []
        self._bound: list[tuple[dict[str, object], object]] = []
        self._owner: _State  # of the counterpart that is being filled
        self._handles: list[tuple[RemovableHandle, RemovableHandle]] = []

    def of(self, model: nn.Module) -> Any:
        """Return the counterpart of a model, complete."""
        hf_model = getattr(model, "original_model", model)  # of a Bridge
        self._of_model = set(map(id, each_module(model, hf_model)))
        counterpart = self(model)
        self._fill_all()
        # What is bound refers to modules' dicts, whose counterparts must exist by then.
        while self._bound:
            attributes, bound = self._bound.pop()
            attributes[BOUND] = self(bound)
            self._fill_all()
        # Handles come last: each refers to its dict of hooks, whose counterpart must exist by then.
        for handle, new_handle in self._handles:
            hooks, number, *others = handle.__getstate__()
            extra = tuple(map(self.counterpart_of, others[0])) if others else ()
            new_handle.__setstate__((self.counterpart_of(hooks), number, extra))
        return counterpart

    def _fill_all(self) -> None:
        # Use a loop: recursion would go as deep as modules refer to one another.
        while self._to_fill:
            self._fill(self._to_fill.pop())

    def counterpart_of(self, value: object) -> Any:
        """Return the counterpart of a value, or the value if it has none."""
        return self._counterparts.get(id(value), value)

    def __call__(self, value: object) -> Any:
        """Return the counterpart of a value, made now if there is none yet, or the value itself."""
        kind: type = type(value)
        if kind in _PLAIN:
            return value
        counterpart = self._counterparts.get(id(value))
        if counterpart is not None:
            return counterpart
        return _rule(kind)(self, value)

    def _holder(self, value: object) -> object:
        kind, attributes = type(value), dict(vars(value))
        # Record the counterpart before it is filled: what it holds may lead back to it.
        counterpart = self._counterparts[id(value)] = object.__new__(kind)
        # Module classes override __setattr__.
        object.__setattr__(counterpart, "__dict__", attributes)
        if issubclass(kind, nn.Module):
            self._counterparts[id(vars(value))] = attributes
            if kind is HookPoint and _is_blank(attributes):
                attributes |= {_UNUSED: self._of_unused, **_NO_HOOKS}
                if attributes.get(_CONVERSION) is not None:
                    attributes[_CONVERSION] = self(attributes[_CONVERSION])
                object.__setattr__(counterpart, "__class__", UnusedHookPoint)
                return counterpart
            attributes[IN_VIEW] = True
        state = _State(kind, attributes, self.changed)
        self._to_fill.append(state)
        self.states.append(state)
        return counterpart

    def _fill(self, state: _State) -> None:
        """Replace the attributes of a counterpart by their counterparts."""
        self._owner, kind, attributes = state, state.kind, state.attributes
        for name, value in attributes.items():
            value_kind = type(value)
            if value_kind in _PLAIN or (name in _SHARED_IF_EMPTY and not value):
                continue
            if name == BOUND:
                self._bound.append((attributes, value))
            elif value_kind in _CONTAINERS and _is_own(kind, name):
                if value:
                    attributes[name] = self._own(value)
                    state.is_hooked |= name in _OF_HOOK_POINTS
                else:
                    state.give_own(name, value_kind)
                    self._counterparts[id(value)] = attributes[name]
            elif kind is LensHandle or getattr(kind, "holds_users_hook", False):
                attributes[name] = self._in_function(value)
            else:
                attributes[name] = self(value)

    def _own(self, value: Any) -> object:
        """Return a new container with the counterparts, even if it leads to no module."""
        counterpart = self._counterparts.get(id(value))
        if counterpart is None or counterpart is value:
            counterpart = self._counterparts[id(value)] = self._owner.new(type(value))
            refill(counterpart, self._parts_of(value))
        return counterpart

    def _parts_of(self, value: object) -> list[object]:
        """Return the counterparts of a container's contents."""
        return [part if type(part) in _PLAIN else self(part) for part in contents_of(value)]

    def _container(self, value: Any) -> object:
        """Return a new container if it leads to modules, and otherwise the same one."""
        self._counterparts[id(value)] = value  # a container may be within itself
        counterparts = self._parts_of(value)
        if all(map(is_, contents_of(value), counterparts)):
            return value
        if isinstance(value, tuple):
            counterpart = getattr(value, "_make", type(value))(counterparts)
        else:
            is_own = type(value) in _CONTAINERS
            counterpart = self._owner.new(type(value)) if is_own else copy.copy(value)
            self._owner.inner += (counterpart,)
            refill(counterpart, counterparts)
        self._counterparts[id(value)] = counterpart
        return counterpart

    # A library's function that leads to a module of the model gets a counterpart, a user's does
    # not. Whatever else a function refers to, such as a list of results, is shared.

    def _in_function(self, value: object) -> Any:
        kind = type(value)  # not `isinstance`: a proxy of a module says that it is one
        is_module = issubclass(kind, nn.Module)
        if (is_module and id(value) not in self._of_model) or issubclass(kind, _COLLECTIONS):
            return value
        if not is_module and kind not in _RULES:
            self._note_captured([value])
        return self(value)

    def _function(self, value: types.FunctionType) -> types.FunctionType:
        self._counterparts[id(value)] = value  # a function may call itself
        if is_of_user(value):
            self._note_captured(_referents(value))
            return value
        counterparts = tuple(map(self._cell, value.__closure__ or ()))
        if all(map(is_, counterparts, value.__closure__ or ())):
            return value
        counterpart = types.FunctionType(
            value.__code__, value.__globals__, value.__name__, value.__defaults__, counterparts
        )
        counterpart.__kwdefaults__ = value.__kwdefaults__
        self._counterparts[id(value)] = counterpart
        return counterpart

    def _cell(self, cell: types.CellType) -> types.CellType:
        try:
            value = cell.cell_contents
        except ValueError:  # the variable is not assigned yet
            return cell
        counterpart = self._in_function(value)
        return cell if counterpart is value else types.CellType(counterpart)

    def _method(self, value: types.MethodType) -> types.MethodType:
        self(value.__func__)
        owner = self._in_function(value.__self__)
        return value if owner is value.__self__ else types.MethodType(value.__func__, owner)

    def _partial(self, value: Any) -> object:
        self._note_captured([value.func, *value.args, *value.keywords.values()])
        return value

    def _note_captured(self, values: Iterable[Any]) -> None:
        """Note if a value that users' code refers to is a module of the model, or holds one."""
        for value in values:
            kind = type(value)
            parts: Iterable[object] = ()
            if kind in _RULES:  # for a user's function, `_function` notes it and returns the same
                if self(value) is not value:
                    self.is_captured = True
            elif issubclass(kind, nn.Module):
                parts = value.modules()
            elif issubclass(kind, _COLLECTIONS):
                parts = contents_of(value)
            elif is_of_user(kind):
                held = getattr(value, "__dict__", {}).values()
                several = (contents_of(it) for it in held if issubclass(type(it), _COLLECTIONS))
                parts = itertools.chain(held, *several)
            if any(id(part) in self._of_model for part in parts):
                self.is_captured = True

    def _handle(self, value: RemovableHandle) -> RemovableHandle:
        counterpart = self._counterparts[id(value)] = object.__new__(type(value))
        self._handles.append((value, counterpart))
        return counterpart

    def _proxy(self, value: Any) -> object:
        # A Bridge's block puts proxies of itself and its attention into closures. A proxy
        # forwards `__repr__` to its object, which it reveals in no other way.
        referent = value.__repr__.__self__
        return weakref.proxy(self(referent)) if isinstance(referent, nn.Module) else value


@functools.lru_cache(maxsize=4096)
def _is_own(kind: type, name: str) -> bool:
    """Return True if objects of a class each have their own container under this name."""
    # Other containers of a module are shared: they may be the user's, as in `model.results = []`.
    return (
        not issubclass(kind, nn.Module)
        or name in _OF_MODULES
        or (issubclass(kind, HookPoint) and name in _OF_HOOK_POINTS)
        or (_is_of(kind, _KNOWN_LIBRARIES) and name.startswith("_"))
    )


def _referents(function: types.FunctionType) -> Iterator[object]:
    """Yield what a function refers to, besides globals."""
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # the variable is not assigned yet
            yield cell.cell_contents
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield from vars(function).values()


def contents_of(container: Any) -> list[Any]:
    """Return the entries of a container; for a dict, the keys and then the values."""
    return [*container, *container.values()] if isinstance(container, dict) else [*container]


def refill(container: Any, contents: list[Any]) -> None:
    """Give a dict, list or set these contents, in place: other objects may hold it."""
    if isinstance(container, dict):
        # The base class's methods: only `OrderedDict.update` notes a change.
        kind = OrderedDict if isinstance(container, OrderedDict) else dict
        n = len(contents) // 2
        kind.clear(container)
        kind.update(container, zip(contents[:n], contents[n:]))
        return
    container.clear()
    if isinstance(container, set):
        container.update(contents)
    else:
        container.extend(contents)


def _same(builder: ViewBuilder, value: object) -> object:
    return value


_RULES: dict[type, Callable[[ViewBuilder, Any], object]] = {
    types.FunctionType: ViewBuilder._function,
    types.MethodType: ViewBuilder._method,
    functools.partial: ViewBuilder._partial,
    RemovableHandle: ViewBuilder._handle,
    weakref.ProxyType: ViewBuilder._proxy,
    weakref.CallableProxyType: ViewBuilder._proxy,
}


@functools.lru_cache(maxsize=4096)
def _rule(kind: type) -> Callable[[ViewBuilder, Any], object]:
    """Return the function that makes counterparts for values of a class."""
    if kind in _RULES:
        return _RULES[kind]
    if issubclass(kind, nn.Module):
        return ViewBuilder._holder
    if issubclass(kind, _COLLECTIONS):
        return ViewBuilder._container
    # Frozen objects are shared: no run changes them.
    is_frozen = getattr(getattr(kind, "__dataclass_params__", None), "frozen", False)
    if not _is_of(kind, _WITH_STATE) or issubclass(kind, (type, Enum)) or is_frozen:
        return _same
    return ViewBuilder._holder if hasattr(kind, "__dict__") else _same


def _is_of(kind: type, packages: tuple[str, ...]) -> bool:
    """Return True if a class is defined in one of these packages."""
    return f"{kind.__module__}.".startswith(tuple(f"{package}." for package in packages))

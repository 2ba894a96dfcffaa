"""Whether all that a stand-in stands for is still what was known, asked of both classes of models.

A stand-in computes what installed code would, in fewer steps and without calling it: a block as one
function of its weights, or transformers' own layer in place of a Bridge's wrappers. It would pass
by whatever somebody puts in that code's place. So it runs only where every object that it stands
for *is* the one that was known: `Definitions` tells that of functions, `Modules` of a module and
those within it. Everything else runs as installed.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache, partialmethod
from itertools import chain, repeat
from operator import attrgetter, contains, is_, itemgetter
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook
from transformer_lens.hook_points import HookPoint

from tl_devicefix.attention.implementation import HOOKS
from tl_devicefix.attention.one_forward import kept_in_forward
from tl_devicefix.dispatch.mixing import only_looks
from tl_devicefix.monkeypatch.applying import in_place
from tl_devicefix.monkeypatch.patch import package_of, patches

hooks_of = itemgetter(*HOOKS)
"""The dicts of hooks in a module's `__dict__`, as they are now: people exchange them whole."""


def hooks_in(modules: Iterable[nn.Module]) -> list[dict[int, Any]]:
    """Every dict of hooks of some modules."""
    return list(chain.from_iterable(map(hooks_of, map(vars, modules))))


_children_of = itemgetter("_modules")
_FORWARD = repeat("forward")
_code_of = attrgetter("__code__")

RECORDING = "transformers.utils.output_capturing"
"""The module of hooks by which transformers records what it is asked to, as attentions."""


def records(hook: Any) -> bool:
    """Whether it is a hook by which transformers records outputs of layers."""
    return getattr(hook, "__module__", None) == RECORDING


def why_not_now(key: Hashable, define: Callable[[], Iterable[Definitions]]) -> str | None:
    """Why a stand-in may not run now: something that it stands for was replaced; None if it may.

    Functions are looked at once in a forward, and after `look_again`.

    Args:
        key: of what it stands for.
        define: finds what this is, where it is not known yet.
    """
    if _has_any_global_hook():
        return "torch has hooks for every module"
    if torch.compiler.is_compiling():
        return "it is compiled"
    replaced: dict[Hashable, str | None] = kept_in_forward().setdefault(_REPLACED, {})
    if key not in replaced:
        replaced[key] = _find_replaced(key, define)
    return replaced[key]


_REPLACED = "replaced"
_known: dict[Hashable, list[Definitions]] = {}


def _find_replaced(key: Hashable, define: Callable[[], Iterable[Definitions]]) -> str | None:
    known = _known.get(key)  # as it is now: other threads may find it meanwhile
    if known is not None and all(definitions.are_same() for definitions in known):
        return None
    now = list(define())
    for definitions in now:
        if (name := definitions.first_foreign()) is not None:
            return f"{name} was replaced"
    if known is not None:
        return "a function that it uses was replaced"
    _known[key] = now
    return None


def look_again() -> None:
    """Look at functions again: hooks have run, which may have replaced some."""
    kept_in_forward().pop(_REPLACED, None)


class Modules:
    """A module and those within it, as they were when they were looked through.

    Each forward compares them. What takes time is to reach for the memory of so many modules. So of
    hook points, which most of them are, the number of attributes is compared, and all else only
    after an attribute of any hook point was set or deleted. What is put into the `__dict__` of one
    in the place of something else is not seen.

    Attributes:
        namespace: the module's `__dict__`.
        classes: those of the modules within it.
        hooks: the dicts of hooks of those within it.
        have_forward: whether any of those has a `forward` in place of its class's.
    """

    def __init__(self, module: nn.Module) -> None:
        self._as_of = _now()
        self.namespace = vars(module)
        within = list(module.modules())[1:]
        self.classes = list(map(type, within))
        self.hooks = hooks_in(within)
        self.have_forward = any(map(contains, map(vars, within), _FORWARD))
        self._points = _Compared([part for part in within if isinstance(part, HookPoint)])
        others = [part for part in within if not isinstance(part, HookPoint)]
        self._others = _Compared([module, *others])
        self._parents = [vars(part) for part in (module, *others) if part._modules]
        self._children = [dict(namespace["_modules"]) for namespace in self._parents]

    def are_same(self) -> bool:
        """Whether they are the same modules, of the same classes, with the same dicts of hooks.

        The number of other attributes is compared.
        """
        now = _now()
        if not all(map(is_, now, self._as_of)):
            if not self._points.are_same():
                return False
            self._as_of = now
        return (
            self._points.have_as_many()
            and self._children == list(map(_children_of, self._parents))
            and self._others.are_same()
        )

    def may_run_others(self) -> bool:
        """Whether hooks may run code of others: TransformerLens's own only keep activations."""
        hooks = chain.from_iterable(map(dict.values, filter(None, self.hooks)))
        has_own = any(hooks_of(self.namespace))
        return has_own or not all(only_looks(hook) or records(hook) for hook in hooks)


class _Compared:
    """Some modules, and what they were like."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._modules = modules
        self._namespaces = list(map(vars, modules))
        self._sizes = list(map(len, self._namespaces))
        self._hooks = hooks_in(modules)
        self._have_forward = list(map(contains, self._namespaces, _FORWARD))
        self._classes = list(map(type, modules))

    def have_as_many(self) -> bool:
        """Whether each has as many attributes."""
        return self._sizes == list(map(len, self._namespaces))

    def are_same(self) -> bool:
        """Whether each is of its class, with its very dicts of hooks, and as many attributes."""
        hooks = chain.from_iterable(map(hooks_of, self._namespaces))
        return (
            self.have_as_many()
            and all(map(is_, hooks, self._hooks))
            and self._have_forward == list(map(contains, self._namespaces, _FORWARD))
            and self._classes == list(map(type, self._modules))
        )


_change = object()
"""It is exchanged for another object after each change of a hook point's attributes."""


def _now() -> tuple[object, object]:
    return _change, in_place()


@patches(
    "HookPoint",
    *("__setattr__", "__delattr__"),
    takes="self name",
    why="blocks need not look at each hook point in each forward",
)
def setting_attribute(original: Any, self: Any, name: str, *value: Any) -> None:
    """`HookPoint.__setattr__` and `__delattr__`, which say that a hook point has changed."""
    original(self, name, *value)
    if name not in _NOT_COUNTED:
        hook_points_changed()


_NOT_COUNTED = frozenset(("fwd_hooks", "bwd_hooks", "ctx", "name", "hook_conversion"))
"""What TransformerLens sets of hook points, and no stand-in depends on."""


def hook_points_changed() -> None:
    """Say that attributes of some hook points were changed."""
    global _change
    _change = object()


class Definitions:
    """Functions that a stand-in does not call, and what they read, as they are when this is made.

    What they read are globals, attributes of modules, and what functions of their package read in
    turn, wherever their code names these.

    Args:
        attributes: classes, and the names of their attributes; names that a class lacks are left
            out.
        installed: what is installed in place of attributes that this package has replaced.
        package: the package that has to have written the attributes.
    """

    def __init__(
        self,
        attributes: Mapping[type, Iterable[str]],
        installed: Iterable[FunctionType] = (),
        package: str = "transformer_lens",
    ) -> None:
        self._owners: list[tuple[type, list[str]]] = []
        for cls, names in attributes.items():
            self._owners.append((cls, [name for name in names if hasattr(cls, name)]))
        self._of_classes = [(attrgetter(*names, "__call__"), cls) for cls, names in self._owners]
        self._package = package
        attributes_now = list(self._attributes())
        attributes_now += [value.fget for value in attributes_now if isinstance(value, property)]
        functions = dict.fromkeys((*installed, *filter(_is_function, attributes_now)))
        to_read, read = list(functions), dict[int, tuple[dict[str, Any], set[str]]]()
        while to_read:
            function = to_read.pop()
            called = [getattr(function, "__wrapped__", None)]
            for namespace, name in _reads(function) if _package(function) == package else ():
                read.setdefault(id(namespace), (namespace, set()))[1].add(name)
                called.append(namespace[name])
            for value in called:
                if _is_function(value) and _package(value) == package and value not in functions:
                    functions[value] = None
                    to_read.append(value)
        self._of_namespaces = [
            (itemgetter("__name__", *names), namespace) for namespace, names in read.values()
        ]
        self._functions = tuple(functions)
        self._codes = self._code()
        self._values = tuple(self._read())

    def _attributes(self) -> Iterator[Any]:
        return chain.from_iterable(get(cls) for get, cls in self._of_classes)

    def _read(self) -> Iterator[Any]:
        of_namespaces = (get(namespace) for get, namespace in self._of_namespaces)
        return chain(self._attributes(), chain.from_iterable(of_namespaces))

    def _code(self) -> list[CodeType]:
        return list(map(_code_of, self._functions))

    def are_same(self) -> bool:
        """Whether each is the very object that it was, with the code that it had."""
        try:
            return all(map(is_, self._read(), self._values)) and self._code() == self._codes
        except (AttributeError, KeyError):  # one of them is gone
            return False

    def first_foreign(self) -> str | None:
        """Name of the first one that neither the package nor a library it uses has written."""
        named = [(f"{cls.__name__}.{name}", getattr(cls, name)) for cls, name in self._names()]
        named += [(function.__qualname__, function) for function in self._functions]
        for name, value in named:
            is_of_torch = value is getattr(nn.Module, name.rpartition(".")[2], None)
            if not self._is_written_by(value, ("torch",) if is_of_torch else ()):
                return name
        for get, namespace in self._of_namespaces:
            for value in get(namespace)[1:]:
                if not self._is_written_by(value, (*_CALLED_LIBRARIES, _top_level(namespace))):
                    return f"{namespace['__name__']}.{getattr(value, '__name__', value)}"
        return None

    def _is_written_by(self, value: Any, libraries: Iterable[str]) -> bool:
        value = value.fget if isinstance(value, property) else value
        if not _is_function(value):
            return isinstance(value, type) or package_of(type(value)) in (*libraries, "builtins")
        file, packages = Path(value.__code__.co_filename), {self._package, *libraries}
        if _folder("torch") in file.parents:
            # A decorator of torch's around somebody's function; transformers has some itself.
            is_torch_s = str(value.__module__).startswith("torch.") and "torch" in packages
            return is_torch_s or self._package == "transformers"
        if _folder("typing") in file.parents and "site-packages" not in file.parts:
            return "typing" in packages
        return not set(map(_folder, packages | {"tl_devicefix"})).isdisjoint(file.parents)

    def _names(self) -> Iterator[tuple[type, str]]:
        return ((cls, name) for cls, names in self._owners for name in (*names, "__call__"))


def definitions_of(classes: Iterable[type]) -> Iterator[Definitions]:
    """All that some classes of modules have of TransformerLens's functions and transformers'."""
    for package in ("transformer_lens", "transformers"):
        attributes = {cls: tuple(_methods(cls, package)) for cls in classes}
        attributes = {cls: names for cls, names in attributes.items() if names}
        yield Definitions({**attributes, nn.Module: ("_call_impl",)}, package=package)


def _methods(cls: type, package: str) -> Iterator[str]:
    """Names of all that a class has of functions, or of what is in their place, of a package."""
    for base in cls.__mro__:
        if package_of(base) == package:
            for name, value in vars(base).items():
                is_method = callable(value) and not isinstance(value, (type, staticmethod))
                if is_method or isinstance(value, partialmethod):
                    yield name


def _is_function(value: Any) -> TypeGuard[FunctionType]:
    return isinstance(value, FunctionType)


def _package(function: FunctionType) -> str:
    return _top_level(function.__globals__)


def _top_level(namespace: dict[str, Any]) -> str:
    return str(namespace.get("__name__")).partition(".")[0]


_CALLED_LIBRARIES = ("torch", "einops", "typing")


@cache
def _folder(package: str) -> Path:
    return Path(str(sys.modules[package].__file__)).parent


def _reads(function: FunctionType) -> Iterator[tuple[dict[str, Any], str]]:
    """Namespaces, and names of what a function calls in them: its module's, and modules' there."""
    codes, names = [function.__code__], set[str]()
    for code in codes:
        names.update(code.co_names)
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    namespaces = [function.__globals__]
    # What is imported where it is called: `from transformers.models.llama.modeling_llama import f`.
    for name in names:
        if "." in name:
            with suppress(ImportError):
                namespaces.append(vars(importlib.import_module(name)))
    for namespace in namespaces:
        for name in names & namespace.keys():
            value = namespace[name]
            if isinstance(value, ModuleType):
                if namespace is function.__globals__:
                    namespaces.append(vars(value))
            elif callable(value):
                yield namespace, name

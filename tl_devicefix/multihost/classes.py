"""Whether classes, and functions of modules, are what was imported: of what was changed since, as
by `torch.nn.functional.softmax = mine`, other ranks know nothing.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import (
    BuiltinFunctionType,
    ClassMethodDescriptorType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any
from weakref import WeakKeyDictionary

import einops
import torch
import transformer_lens.hook_points  # noqa: F401  # and with it all components

from tl_devicefix.monkeypatch.applying import original

PACKAGES = ("torch", "transformer_lens", "tl_devicefix", "transformers", "numpy", "einops")
"""Those of which blocks may be made, beside Python itself: of one version on all ranks."""
_PACKAGES = {*sys.stdlib_module_names, *PACKAGES} - {"__main__"}
_OF_C = (
    *(BuiltinFunctionType, ClassMethodDescriptorType, GetSetDescriptorType),
    *(MemberDescriptorType, MethodDescriptorType, WrapperDescriptorType),
)


def is_everywhere(module: str | None) -> bool:
    """Whether all ranks have a module; others, as a notebook, may be rank 0's alone."""
    return module is not None and _package(module) in _PACKAGES


def is_function_everywhere(function: FunctionType) -> bool:
    """Whether all ranks have a function: what it says of itself may be what it wraps."""
    return is_everywhere(function.__module__) and is_everywhere(_written_in(function))


def is_as_imported(cls: type) -> bool:
    """Whether a class is what every rank has, now."""
    before = _known.get(cls)
    if before is None or not before[0].holds():
        seen = SeenClasses([cls])
        _known[cls] = before = seen, seen.are_as_imported()
    return before[1]


class SeenClasses:
    """What was in classes, and in those that they inherit from.

    Args:
        classes: of which the same is asked again and again.
    """

    def __init__(self, classes: Iterable[type]) -> None:
        inherited = dict.fromkeys(base for each in set(classes) for base in each.__mro__[:-1])
        self._seen = [(each, vars(each), tuple(vars(each).values())) for each in inherited]

    def holds(self) -> bool:
        """Whether nothing was put into them since."""
        return all(tuple(now.values()) == then for _, now, then in self._seen)

    def are_as_imported(self) -> bool:
        """Whether they are what every rank has."""
        return all(
            is_everywhere(cls.__module__)
            and all(_is_of(cls, name, value) for name, value in now.items())
            for cls, now, _ in self._seen
        )


def _is_of(cls: type, name: str, value: Any) -> bool:
    """Whether it is what a class's own module put there, or a package that all ranks have."""
    functions = list(_functions_in(value))
    if any(_package(_written_in(each)) == "tl_devicefix" for each in functions):
        value = original(cls, name)  # which may have been changed before this package came
        functions = list(_functions_in(value))
    if functions:
        return all(_may_be_in(cls, _written_in(each)) for each in functions)
    acts = callable(value) or hasattr(type(value), "__get__")
    return not acts or isinstance(value, (type, *_OF_C))


def _may_be_in(cls: type, module: str) -> bool:
    """Whether a class has functions of a module, if nobody put them there by hand.

    Transformers, and this package, put some into torch's own, and `dataclass` its own.
    """
    is_put = _package(cls.__module__) == "torch" and is_everywhere(module)
    return module in (cls.__module__, dataclass.__module__) or is_put


def _functions_in(value: Any) -> Iterator[FunctionType]:
    if isinstance(value, property):
        value = [value.fget, value.fset, value.fdel]
    elif isinstance(value, classmethod | staticmethod):
        value = [value.__func__]
    elif isinstance(value, functools.cached_property):
        value = [value.func]
    else:
        value = [value]
    return (each for each in value if isinstance(each, FunctionType))


def _written_in(function: FunctionType) -> str:
    return str(function.__globals__.get("__name__"))


def _package(module: str) -> str:
    return module.partition(".")[0]


_known: WeakKeyDictionary[type, tuple[SeenClasses, bool]] = WeakKeyDictionary()


class _Functions:
    """Functions of a module, or methods of a class, as they were at first.

    Args:
        of: the module or class.
    """

    def __init__(self, of: ModuleType | type) -> None:
        self._of = of
        self._is_class = isinstance(of, type)
        self._name = f"{of.__module__}.{of.__name__}" if isinstance(of, type) else of.__name__
        self._first = self._now()
        if _package(self._name) == "torch":  # what is not torch's was exchanged before this
            now = self._first.items()
            self._first = {name: None if _is_foreign(each) else each for name, each in now}
        self._seen: tuple[Any, list[str]] = None, []

    def exchanged(self) -> list[str]:
        """Names of those that are other ones now."""
        there = vars(self._of)
        values = tuple(there.values() if self._is_class else map(there.get, self._first))
        seen, found = self._seen
        if values != seen:
            now = self._now()
            found = [
                f"{self._name}.{name}"
                for name, first in self._first.items()
                if now.get(name) is not first and not _is_known(now.get(name), name)
            ]
            self._seen = values, found
        return found

    def _now(self) -> dict[str, Any]:
        bases = reversed(self._of.__mro__) if isinstance(self._of, type) else [self._of]
        return {
            name: each
            for base in bases
            for name, each in vars(base).items()
            if callable(each) and not isinstance(each, type) and (self._is_class or name[0] != "_")
        }


def _is_foreign(value: Any) -> bool:
    return isinstance(value, FunctionType) and not is_function_everywhere(value)


def _is_known(value: Any, name: str) -> bool:
    """Whether it is a function that was put there by torch, by TransformerLens, or by us."""
    if not isinstance(value, FunctionType) or not is_function_everywhere(value):
        return False
    return value.__name__ == name or _package(_written_in(value)) == "tl_devicefix"


def _namespaces() -> list[ModuleType | type]:
    """Where blocks find functions: torch, einops, their own modules, and those of their helpers."""
    own = [each for name, each in sys.modules.items() if name.startswith(_COMPONENTS)]
    functions = (it for each in own for it in vars(each).values() if isinstance(it, FunctionType))
    others = {each for each in map(_written_in, functions) if _package(each) == "transformer_lens"}
    own += [sys.modules[each] for each in sorted(others - {each.__name__ for each in own})]
    of_torch: list[ModuleType | type] = [
        torch,
        torch.nn.functional,
        torch.linalg,
        torch.special,
        torch.fft,
        torch.Tensor,
    ]
    return [*of_torch, einops, *own]


_COMPONENTS = "transformer_lens.components"
_FUNCTIONS = list(map(_Functions, _namespaces()))


def exchanged_functions() -> tuple[str, ...]:
    """Functions that blocks may use and that are not what was imported: "torch.bmm", say."""
    return tuple(name for each in _FUNCTIONS for name in each.exchanged())

"""Apply a table of patches, undo it, and find the originals.

Either all patches are applied or none: a missing target, or one with an unknown signature, raises
before anything is replaced.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial, wraps
from types import FunctionType
from typing import Any, NamedTuple
from unittest import mock

from tl_devicefix.monkeypatch.patch import Patch, check_target, named

_MISSING = object()
_Function = Callable[..., Any]


class _Replacement(NamedTuple):
    """One attribute that is replaced; `before` is _MISSING if it was inherited."""

    owner: type
    name: str
    before: object
    after: object


# `_replaced` is set before the first change, and cleared after the last one is undone. So after an
# interrupt, the next `apply_patches` or `remove_patches` can finish the job.
_replaced: tuple[_Replacement, ...] = ()
_functions: dict[_Function, _Function] = {}  # a module's installed function -> ours
_is_enabled = False
# The table that was applied last, which `disabled` applies again.
_applied: Sequence[Patch] = ()


def apply_patches(table: Sequence[Patch]) -> None:
    """Apply a table, unless it is applied already."""
    global _applied, _functions, _is_enabled, _replaced
    if is_enabled():
        return
    remove_patches()  # finish a call that was interrupted
    for patch in table:
        check_target(patch)
    replacements: list[_Replacement] = []
    functions: dict[_Function, Any] = {}
    for patch in table:  # prepare all before setting any: a target may be wrong
        target = named(patch.owner or patch.name)
        if patch.owner is None:
            functions[target] = _like_installed(target, patch.replacement)
            continue
        installed = inspect.getattr_static(target, patch.name)
        after = _like_installed(installed, patch.replacement)
        before = vars(target).get(patch.name, _MISSING)
        replacements.append(_Replacement(target, patch.name, before, after))
    _applied, _replaced, _functions = table, tuple(replacements), functions
    for owner, name, _, after in _replaced:
        setattr(owner, name, after)
    _rename(_functions)
    _is_enabled = True


_WITHOUT_THEM = ("torch.", "transformers.", "sympy.", "pandas.", "scipy.", "numpy.", "networkx.")
"""Packages that never import a function of TransformerLens, with two thirds of all names."""


def _rename(functions: Mapping[_Function, _Function]) -> None:
    """Replace functions in all modules that have imported them, or a partial of one."""
    for path, module in [*sys.modules.items()] if functions else ():  # there are some 5000
        names = {} if path.startswith(_WITHOUT_THEM) else getattr(module, "__dict__", {})
        for name, value in [*names.items()]:
            function = value.func if type(value) is partial else value
            if type(function) is not FunctionType or function not in functions:
                continue
            if function is value:
                setattr(module, name, functions[function])
            else:  # in place: others may have imported the partial
                state = functions[function], value.args, value.keywords, vars(value)
                value.__setstate__(state)


def remove_patches() -> None:
    """Undo all patches: restore the objects that `apply_patches` replaced."""
    global _functions, _is_enabled, _replaced
    _is_enabled = False
    for owner, name, before, _ in _replaced:
        if before is not _MISSING:
            setattr(owner, name, before)
        elif name in vars(owner):
            delattr(owner, name)
    # Search again: modules may have imported ours meanwhile.
    _rename({ours: installed for installed, ours in _functions.items()})
    _replaced, _functions = (), {}


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Undo all patches within a `with` block, in all threads."""
    were_enabled = is_enabled()
    remove_patches()
    try:
        yield
    finally:
        if were_enabled:
            apply_patches(_applied)


def is_enabled() -> bool:
    """Return True if all patches are applied."""
    return _is_enabled


def original(cls: type, name: str) -> Any:
    """Return the unpatched `cls.name`, raw as in the class's `__dict__`."""
    own = vars(cls)[name]
    return next((r.before for r in _replaced if (r.owner, r.name) == (cls, name)), own)


@cache  # applying again has to assign the same object
def _like_installed(installed: Any, replacement: _Function) -> object:
    """Return the replacement as a property, classmethod or function, like the installed one."""
    is_property = isinstance(installed, property)
    function = installed.fget if is_property else getattr(installed, "__func__", installed)
    if next(iter(inspect.signature(replacement).parameters), None) == "original":
        replacement = _around(function, replacement)
    if is_property:
        return property(replacement, doc=installed.__doc__)
    is_bound = isinstance(installed, classmethod | staticmethod)
    return type(installed)(replacement) if is_bound else replacement


def _around(original: _Function, replacement: _Function) -> _Function:
    """Wrap the installed function in one that calls a replacement with it.

    `call` is a partial for nnsight, whose `.source` looks through a wrapper only if this calls
    exactly one function of its closure by name: here `original`, since a partial is no function.
    """
    call = partial(replacement)

    @wraps(original)
    def method(*args: object, **kwargs: object) -> object:
        if not _replaced:  # somebody may have kept this method from before `disable`
            return original(*args, **kwargs)
        return call(original, *args, **kwargs)

    ours = inspect.signature(replacement).parameters.values()
    added = [parameter for parameter in ours if parameter.kind is parameter.KEYWORD_ONLY]
    if added:  # help() shows the installed signature with these, and both docstrings
        parameters = [*inspect.signature(original).parameters.values(), *added]
        parameters.sort(key=lambda parameter: parameter.kind)  # `**hf_kwargs` comes last
        shown = inspect.signature(original).replace(parameters=parameters)
        method.__signature__ = shown  # type: ignore[attr-defined]
        method.__doc__ = f"{replacement.__doc__}\n\n{original.__doc__}"
    return method


@contextlib.contextmanager
def replaced_in_thread(owner: object, name: str, replacement: _Function) -> Iterator[None]:
    """Replace a function within a `with` block, for this thread's calls only.

    Only one thread at a time may be within it: hold the lock `one_load`.

    Args:
        owner: the module that has the function, or the class of the method.
        name: its name there.
        replacement: called with the function (a classmethod is bound) and with its arguments.
    """
    installed: Any = vars(owner)[name]
    thread = threading.get_ident()

    def call(*args: Any, **kwargs: object) -> object:
        function = installed
        if isinstance(installed, classmethod):
            function, args = installed.__get__(None, args[0]), args[1:]
        if threading.get_ident() != thread:
            return function(*args, **kwargs)
        return replacement(function, *args, **kwargs)

    is_bound = isinstance(installed, classmethod | staticmethod)
    with mock.patch.object(owner, name, type(installed)(call) if is_bound else call):
        yield

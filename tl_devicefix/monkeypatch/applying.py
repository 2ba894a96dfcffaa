"""Apply a table of patches, undo it, and find the originals.

Either all patches are applied or none: a missing target, or one with an unknown signature, raises
before anything is replaced.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial, wraps
from types import FunctionType
from typing import Any, NamedTuple
from unittest import mock

from tl_devicefix.monkeypatch.patch import Patch, check_target, named, package_of
from tl_devicefix.monkeypatch.versions import UnsupportedTransformerLens

_MISSING = object()
_Function = Callable[..., Any]


class _Replacement(NamedTuple):
    """One attribute that is replaced; `before` is _MISSING if it was inherited."""

    owner: type | FunctionType
    name: str
    before: object
    after: object


def _own(owner: type | FunctionType, name: str) -> object:
    """Return an attribute of a function, or one from a class's own `__dict__`."""
    if isinstance(owner, FunctionType):
        return getattr(owner, name, _MISSING)
    return vars(owner).get(name, _MISSING)


# Everything that is replaced. Set before the first change and cleared after the last one is undone,
# so that after an interrupt the next `enable` or `disable` can finish the job.
_replaced: tuple[_Replacement, ...] = ()
_is_enabled = False
# The table that was applied last, because `disabled` applies it again.
_applied: Sequence[Patch] = ()


def enable(table: Sequence[Patch]) -> None:
    """Apply a table, unless it is applied already."""
    if is_enabled():
        return
    disable()  # finish a `disable` that was interrupted
    for patch in table:
        check_target(patch)
    _replace(table)


def _replace(table: Sequence[Patch]) -> None:
    """Apply a table that was checked and is not applied."""
    global _applied, _is_enabled, _originals, _replaced
    replacements: list[_Replacement] = []
    for patch in table:  # all of them before any is set, because a target may be wrong
        target = named(patch.owner or patch.name)
        if patch.owner is None:
            replacements += _within_function(target, patch.replacement)
            continue
        installed = inspect.getattr_static(target, patch.name)
        after = _like_installed(installed, patch.replacement)
        replacements.append(_Replacement(target, patch.name, _own(target, patch.name), after))
    _applied, _replaced, _originals = table, tuple(replacements), {}
    for owner, name, _, after in _replaced:
        setattr(owner, name, after)
    _is_enabled = True


def _within_function(function: FunctionType, replacement: _Function) -> Iterator[_Replacement]:
    """Make a function call its replacement by exchanging its code.

    The function object stays, because others have imported it or hold it in a partial.
    """
    # A function of its own, because `function` has the new code once this is applied.
    if function.__closure__:
        raise UnsupportedTransformerLens(
            f"{function.__name__} of transformer_lens was decorated by somebody, and cannot be "
            "patched then; nothing was replaced: import tl_devicefix first"
        )
    original = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__
    )
    original.__kwdefaults__ = function.__kwdefaults__
    original.__annotations__ = function.__annotations__
    vars(original).update(vars(function))  # such as a decorator's `__wrapped__`
    instead = {
        "__wrapped__": original,  # because `help` shows its signature
        "__kwdefaults__": {"_replacement": partial(replacement, original)},
        # Set last and restored first, because this code needs the attributes above.
        "__code__": _call.__code__,
    }
    for name, after in instead.items():
        yield _Replacement(function, name, _own(function, name), after)


def _call(*args: object, _replacement: _Function, **kwargs: object) -> object:
    return _replacement(*args, **kwargs)


def disable() -> None:
    """Undo all patches: TransformerLens gets the objects back that `enable` replaced."""
    global _is_enabled, _originals, _replaced
    _is_enabled = False
    # Backwards, because a function's code has to go before the replacement that it calls.
    for owner, name, before, _ in reversed(_replaced):
        if before is not _MISSING:
            setattr(owner, name, before)
        elif name in vars(owner):
            delattr(owner, name)
    _replaced, _originals = (), {}


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Undo all patches within a `with` block, in all threads."""
    were_enabled = is_enabled()
    disable()
    try:
        yield
    finally:
        if were_enabled and not is_enabled():
            disable()  # because one that was interrupted may have left some
            _replace(_applied)


def is_enabled() -> bool:
    """Return True if all patches are applied."""
    return _is_enabled


def original(cls: type, name: str) -> Any:
    """Return the unpatched `cls.name`, raw as in the class's `__dict__`."""
    cached = _originals
    if (cls, name) not in cached:
        cached[cls, name] = _find_original(cls, name)
    return cached[cls, name]


# A cache, because each forward asks. Another dict when the patches change, so that a thread that
# looks up meanwhile cannot leave an old answer.
_originals: dict[tuple[type, str], object] = {}


def _find_original(cls: type, name: str) -> object:
    for base in cls.__mro__:
        # Skip users' subclasses, because their from_pretrained is not TransformerLens's.
        if package_of(base) not in ("transformer_lens", "torch"):
            continue
        own = vars(base).get(name, _MISSING)
        attribute = next((r.before for r in _replaced if (r.owner, r.name) == (base, name)), own)
        if attribute is not _MISSING:
            return attribute
    raise AttributeError(f"{cls.__name__} has no {name}")


@cache  # because applying again has to put the same object there
def _like_installed(installed: Any, replacement: _Function) -> object:
    """Return the replacement as a property, classmethod or function, like the installed one."""
    if isinstance(installed, classmethod):
        return _classmethod_like(installed.__func__, replacement)
    if next(iter(inspect.signature(replacement).parameters), None) == "original":
        is_property = isinstance(installed, property)
        function = installed.fget if is_property else getattr(installed, "__func__", installed)
        replacement = _around(function, replacement)
    if isinstance(installed, property):
        return property(replacement, doc=installed.__doc__)
    return staticmethod(replacement) if isinstance(installed, staticmethod) else replacement


def _around(original: _Function, replacement: _Function) -> _Function:
    """Wrap the installed function in one that calls a replacement with it.

    The replacement is a partial because of nnsight: its `.source` looks through a wrapper that
    calls exactly one function of its closure by name, and exchanges that function for a copy.
    """
    call = partial(replacement)

    @wraps(original)
    def method(*args: object, **kwargs: object) -> object:
        if not _replaced:  # because somebody may have kept this method from before `disable`
            return original(*args, **kwargs)
        return call(original, *args, **kwargs)

    return method


def _classmethod_like(target: _Function, replacement: _Function) -> object:
    new = [
        parameter
        for parameter in inspect.signature(replacement).parameters.values()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    ]
    # New ones before the last, because that is `**hf_kwargs`.
    *parameters, hf_kwargs = inspect.signature(target).parameters.values()

    def method(cls: type, *args: object, **kwargs: object) -> object:
        return replacement(cls, *args, **kwargs)

    # help() shows the installed signature with the new arguments, and both docstrings.
    method.__name__, method.__qualname__ = target.__name__, target.__qualname__
    method.__doc__ = f"{replacement.__doc__}\n\n{target.__doc__ or ''}"
    method.__signature__ = inspect.Signature([*parameters, *new, hf_kwargs])  # type: ignore[attr-defined]
    return classmethod(method)


@contextlib.contextmanager
def replaced_in_thread(owner: object, name: str, replacement: _Function) -> Iterator[None]:
    """Replace a function for this thread's calls, within a `with` block; others call it as it is.

    Only one thread at a time may be within it: hold `one_load`.

    Args:
        owner: the module that has the function, or the class of the method.
        name: its name there.
        replacement: called with the function, which needs no class, and with its arguments.
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

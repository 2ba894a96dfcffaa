"""Replace what a table of patches names, put it back, and find what was there.

Nothing is replaced unless everything can be: a target that is missing or has another signature
than the one known leaves TransformerLens as it was, and says so.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import cache, wraps
from typing import Any

from tl_devicefix.patching.patch import Patch
from tl_devicefix.patching.targets import check_target, class_named, modules, owners

_MISSING = object()
# What was replaced: (object, attribute, what was there, or _MISSING if it was inherited).
_replaced: list[tuple[Any, str, Any]] = []


# The table that is applied, or was applied last: `unpatched` applies it again.
_applied: Sequence[Patch] = ()


def apply(table: Sequence[Patch]) -> None:
    """Replace everything in a table.

    Args:
        table: the patches; nothing may be applied yet.

    Raises:
        UnsupportedTransformerLens: if this TransformerLens cannot be patched; it is untouched.
    """
    assert not _replaced, "patches are applied already"
    for patch in table:
        check_target(patch)
    _replace(table)


def _replace(table: Sequence[Patch]) -> None:
    """Replace everything in a table that was checked."""
    global _applied
    _originals.clear()
    _applied = table
    # Looked for once: it takes longer than all else.
    imported = modules()
    for patch in table:
        if patch.replacement is None:
            continue
        for owner in owners(patch, imported):
            there = vars(owner).get(patch.name, _MISSING)
            _replaced.append((owner, patch.name, there))
            setattr(owner, patch.name, _as_found(patch, there))


def restore() -> None:
    """Put back the very objects that `apply` replaced. Does nothing if nothing is replaced.

    A model that is spread over devices at that time still runs, but what it caches is not read at
    home, its weights are not gathered, and hooks that are added before `apply` is called again may
    not mix devices.
    """
    _originals.clear()
    there_now = modules() if _replaced else []
    while _replaced:
        owner, name, there = _replaced.pop()
        replacement = vars(owner).get(name)
        if there is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, there)
        if inspect.ismodule(owner):
            for module in there_now:  # also those that were imported since
                if vars(module).get(name) is replacement:
                    setattr(module, name, there)


@contextlib.contextmanager
def unpatched() -> Iterator[None]:
    """TransformerLens as it was installed, within a `with` block."""
    were_applied = is_applied()
    restore()
    try:
        yield
    finally:
        if were_applied and not is_applied():
            _replace(_applied)


def is_applied() -> bool:
    """Whether the patches are in place."""
    return bool(_replaced)


def original(cls: type, name: str) -> Any:
    """What `cls.name` is without the patches: the raw attribute, as in the class's `__dict__`.

    Raises:
        AttributeError: if TransformerLens has no such attribute.
    """
    if (cls, name) not in _originals:
        _originals[cls, name] = _find_original(cls, name)
    return _originals[cls, name]


# Looked up at every forward, so kept; forgotten when the patches change.
_originals: dict[tuple[type, str], Any] = {}


def _find_original(cls: type, name: str) -> Any:
    for base in cls.__mro__:
        # A subclass's own from_pretrained is not TransformerLens's: look further up.
        if base.__module__.partition(".")[0] not in ("transformer_lens", "torch"):
            continue
        replaced = {attribute: there for owner, attribute, there in _replaced if owner is base}
        found = replaced.get(name, vars(base).get(name, _MISSING))
        if found is not _MISSING:
            return found
    raise AttributeError(f"{cls.__name__} has no {name}")


def _as_found(patch: Patch, there: Any) -> Any:
    """The replacement in the form of what it replaces: a classmethod stays one."""
    assert patch.replacement is not None
    if isinstance(there, classmethod):
        return _classmethod_like(there, patch.replacement)
    if isinstance(there, property):
        return _property_like(there, patch.replacement)
    takes = inspect.signature(patch.replacement).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in takes):
        owner = class_named(patch.owner or "HookedTransformer")
        return _method_like(getattr(owner, patch.name), patch.replacement)
    return patch.replacement


@cache  # so that applying again puts the same object there
def _method_like(there: Any, replacement: Callable[..., Any]) -> Any:
    """The replacement with the signature and docstring of what it wraps."""

    @wraps(there)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return replacement(self, *args, **kwargs)

    return method


@cache
def _property_like(there: property, replacement: Any) -> property:
    """The replacement, a getter, with the docstring of what it replaces."""
    return property(replacement, doc=there.__doc__)


@cache
def _classmethod_like(there: Any, replacement: Callable[..., Any]) -> Any:
    target = there.__func__
    new = [
        parameter
        for parameter in inspect.signature(replacement).parameters.values()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    ]
    *parameters, hf_kwargs = inspect.signature(target).parameters.values()

    def method(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return replacement(cls, *args, **kwargs)

    # help() shows the installed signature with what is new, and both docstrings.
    method.__name__, method.__qualname__ = target.__name__, target.__qualname__
    method.__doc__ = f"{replacement.__doc__}\n\n{target.__doc__ or ''}"
    method.__signature__ = inspect.Signature([*parameters, *new, hf_kwargs])  # type: ignore[attr-defined]
    return classmethod(method)

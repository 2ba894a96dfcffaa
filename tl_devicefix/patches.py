"""What is replaced in TransformerLens, for which versions, and why; apply it and undo it.

Nothing is replaced unless everything can be: a target that is missing or has another signature
than the one known leaves TransformerLens as it was, and says so.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any

from packaging.version import Version

from tl_devicefix.versions import (
    SUPPORTED,
    UnsupportedTransformerLens,
    check_version,
    has_bridge,
    has_hooked_transformer,
    installed,
)


@dataclass(frozen=True)
class Patch:
    """One thing that is replaced."""

    name: str
    """The attribute of `owner`, or the function."""
    replacement: Callable[..., Any] | None
    """What takes its place; None if it is only called, and has to be there."""
    parameters: tuple[str, ...]
    """Parameters that the installed target must have, in this order, for the patch to be right."""
    why: str
    owner: str | None = "HookedTransformer"
    """The class it is an attribute of; None for a function that several modules import."""
    since: str = "2.16.1"
    """The first TransformerLens version that has it."""
    until: str = "3.9"
    """The last one."""

    @property
    def target(self) -> str:
        """What is replaced, as a person would write it."""
        return f"{self.owner}.{self.name}" if self.owner else self.name


def _table() -> tuple[Patch, ...]:
    """Every patch for the installed TransformerLens; imported here, so that it is checked first."""
    from tl_devicefix import shared_patches

    patches = [*shared_patches.PATCHES]
    if has_hooked_transformer():
        from tl_devicefix import hooked_patches

        patches += hooked_patches.PATCHES
    if has_bridge():
        from tl_devicefix.bridge import patch_table

        patches += patch_table.PATCHES
    return tuple(patch for patch in patches if installed() >= Version(patch.since))


_MISSING = object()
# What was replaced: (object, attribute, what was there, or _MISSING if it was inherited).
_replaced: list[tuple[Any, str, Any]] = []


def apply() -> None:
    """Replace everything in the table; does nothing if that is done already.

    Raises:
        UnsupportedTransformerLens: if this TransformerLens cannot be patched; it is untouched.
    """
    if _replaced:
        return
    check_version()
    _originals.clear()
    table = _table()
    for patch in table:
        _check_target(patch)
    for patch in table:
        if patch.replacement is None:
            continue
        for owner in _owners(patch):
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
    while _replaced:
        owner, name, there = _replaced.pop()
        replacement = vars(owner).get(name)
        if there is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, there)
        if inspect.ismodule(owner):
            for module in _modules_with(name, replacement):  # which were imported since
                setattr(module, name, there)


@contextlib.contextmanager
def patched() -> Iterator[None]:
    """Apply the patches within a `with` block, and leave them as they were after it."""
    were_applied = is_applied()
    apply()
    try:
        yield
    finally:
        if not were_applied:
            restore()


@contextlib.contextmanager
def unpatched() -> Iterator[None]:
    """TransformerLens as it was installed, within a `with` block."""
    were_applied = is_applied()
    restore()
    try:
        yield
    finally:
        if were_applied:
            apply()


def is_applied() -> bool:
    """Whether the patches are in place."""
    return bool(_replaced)


def report() -> None:
    """Print a table of what is replaced, for which TransformerLens versions, and why."""
    check_version()
    state = "applied" if is_applied() else "not applied"
    print(f"tl_devicefix on transformer_lens {installed()}: {state}")
    rows = [("target", "TL versions", "why")]
    for patch in _table():
        if patch.replacement is None:
            continue
        rows.append((patch.target, f"{patch.since} - {patch.until}", patch.why))
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    for target, versions, why in rows:
        print(f"{target:<{widths[0]}}  {versions:<{widths[1]}}  {why}")


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


def _owners(patch: Patch) -> list[Any]:
    """The class, or every module that has imported the function."""
    if patch.owner:
        return [_class(patch.owner)]
    # TransformerLens 3 imports the name itself into each user; 2 goes through its module.
    return _modules_with(patch.name, _function(patch.name))


def _modules_with(name: str, value: Any) -> list[Any]:
    """TransformerLens's modules in which a name means this."""
    return [
        module
        for module_name, module in list(sys.modules.items())
        if module_name.partition(".")[0] == "transformer_lens" and vars(module).get(name) is value
    ]


def _class(name: str) -> Any:
    for module_name in (
        "transformer_lens",
        "transformer_lens.hook_points",
        "transformer_lens.model_bridge",
        "transformer_lens.weight_processing",
    ):
        if importlib.util.find_spec(module_name) is not None:
            # TransformerLens 4 raises ImportError at the names that it has dropped.
            found = vars(importlib.import_module(module_name)).get(name)
            if found is not None:
                return found
    return None


def _function(name: str) -> Any:
    """The module-level function, wherever it is in this TransformerLens; None if nowhere."""
    modules = ["transformer_lens.utilities.multi_gpu", "transformer_lens.utilities.devices"]
    modules += ["transformer_lens.train"]
    if has_bridge():
        modules += ["transformer_lens.patching"]
        modules += ["transformer_lens.tools.analysis.direct_path_patching"]
        modules += ["transformer_lens.tools.analysis.attribution_patching"]
    for module_name in modules:
        if importlib.util.find_spec(module_name) is not None:
            found = vars(importlib.import_module(module_name)).get(name)
            if found is not None:
                return found
    return None


def _check_target(patch: Patch) -> None:
    target = (
        getattr(_class(patch.owner), patch.name, None) if patch.owner else _function(patch.name)
    )
    if target is None:
        raise UnsupportedTransformerLens(
            f"transformer_lens {installed()} has no {patch.target}, which tl_devicefix replaces; "
            f"it is left as it was: install a version with {SUPPORTED}"
        )
    function: Any = getattr(target, "__func__", target)
    if isinstance(target, property):
        function = target.fget
    there = list(inspect.signature(inspect.unwrap(function)).parameters)
    known = [name for name in there if name in patch.parameters]
    if known != list(patch.parameters):
        raise UnsupportedTransformerLens(
            f"{patch.target} of transformer_lens {installed()} takes ({', '.join(there)}), "
            f"not the ({', '.join(patch.parameters)}, ...) that tl_devicefix knows; it is left as "
            f"it was: install a version with {SUPPORTED}"
        )


def _as_found(patch: Patch, there: Any) -> Any:
    """The replacement in the form of what it replaces: a classmethod stays one."""
    assert patch.replacement is not None
    if isinstance(there, classmethod):
        return _classmethod_like(there, patch.replacement)
    if isinstance(there, property):
        return _property_like(there, patch.replacement)
    takes = inspect.signature(patch.replacement).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in takes):
        owner = _class(patch.owner or "HookedTransformer")
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

"""`Patch`, and the search for its target in the installed TransformerLens."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from packaging.version import Version

from tl_devicefix.monkeypatch.versions import (
    SUPPORTED,
    UnsupportedTransformerLens,
    has_bridge,
    installed,
)


@dataclass(frozen=True)
class Patch:
    """One function, method or property that is replaced, mostly of TransformerLens."""

    name: str
    """The attribute of `owner`, or the function."""
    replacement: Callable[..., Any]
    """The function that takes its place.

    If its first parameter is `original`, it gets the installed function before the arguments.
    """
    parameters: tuple[str, ...]
    """Parameters that the installed target must have, in this order, for the patch to be right."""
    why: str
    owner: str | None
    """The class it is an attribute of; None for a function of a module."""
    since: str
    """The first TransformerLens version that has it."""
    until: str
    """The last one that has it, or that needs the patch: "3" stands for any 3.x."""

    @property
    def target(self) -> str:
        """The name of the target, as you would write it."""
        return f"{self.owner}.{self.name}" if self.owner else self.name

    @property
    def is_of_installed(self) -> bool:
        """True if the installed TransformerLens is one of the versions `since` to `until`."""
        last = Version(self.until).release
        return Version(self.since) <= installed() and installed().release[: len(last)] <= last


_VERSIONS = {"HookedTransformer": ("2.16.1", "3"), "TransformerBridge": ("3.9", "4")}
"""Model class -> the first and the last supported TransformerLens version that has it."""
_patches: dict[tuple[str, str], Patch] = {}

Replacement = TypeVar("Replacement", bound=Callable[..., Any])


def patches(
    owner: str | None,
    *names: str,
    takes: str = "",
    why: str,
    since: str | None = None,
    until: str | None = None,
) -> Callable[[Replacement], Replacement]:
    """Add the decorated function to the table of patches, which `enable()` applies.

        @patches("HookedTransformer", takes="self state_dict", why="folded where they lie")
        def load_and_process_state_dict(original, self, state_dict): ...

    Args:
        owner: the class whose attribute is replaced; None for a function of a module.
        names: the attributes that it replaces; by default the one with the function's own name.
        takes: the parameters that the installed function must have for this one to be right.
        why: a few words for `tl_devicefix.report()`.
        since: the first TransformerLens version that has it; by default, the first with `owner`.
        until: the last one that has it, or that needs it.
    """
    first, last = _VERSIONS.get(owner or "", ("2.16.1", "4"))

    def register(replacement: Replacement) -> Replacement:
        for name in names or (replacement.__name__,):
            parameters = tuple(takes.split())
            versions = since or first, until or last
            patch = Patch(name, replacement, parameters, why, owner, *versions)
            _patches[patch.target, patch.since] = patch
        return replacement

    return register


def registered() -> tuple[Patch, ...]:
    """Return imported modules' patches for the installed version, sorted by class and name."""
    applicable = (patch for patch in _patches.values() if patch.is_of_installed)
    return tuple(sorted(applicable, key=lambda patch: (patch.owner or "~", patch.name)))


LIBRARIES = ("torch", "transformers", "transformer_lens", "accelerate")
"""The packages, besides this one, whose modules, hooks and code are not the user's."""


def owner_of(item: object) -> str:
    """Return the name of the module that defines a function, a class, or an instance's class.

    A wrapper that a library or this package made counts as what it wraps.
    """
    while True:
        # functools.wraps() sets a function's __module__ to the wrapped one's, so read its globals.
        scope = getattr(item, "__globals__", None)
        name = scope.get("__name__") if isinstance(scope, dict) else None  # FunctionType's is not
        owner: str = name or getattr(item, "__module__", None) or type(item).__module__
        wrapped = getattr(item, "__wrapped__", None)
        if wrapped is None or owner.partition(".")[0] not in ("tl_devicefix", *LIBRARIES):
            return owner
        item = wrapped


def package_of(item: object) -> str:
    """Return the top-level package of `owner_of(item)`."""
    return owner_of(item).partition(".")[0]


def is_of_user(hook: object) -> bool:
    """Return True if a hook is neither this package's nor a library's own."""
    return package_of(hook) not in ("tl_devicefix", *LIBRARIES)


_MODULES = (
    *("transformer_lens", "transformer_lens.hook_points", "transformer_lens.patching"),
    *(f"transformer_lens.utilities{name}" for name in (".attention", ".multi_gpu", ".devices", "")),
)
_OF_2 = ("transformer_lens.utils",)
_OF_BRIDGE = (
    *("transformer_lens.model_bridge", "transformer_lens.model_bridge.generalized_components"),
    "transformer_lens.tools.analysis.direct_path_patching",
    "transformer_lens.tools.analysis.attribution_patching",
    "transformers.masking_utils",
)


def named(name: str) -> Any:
    """Return the class or function of this name in the patched modules; None if none has it."""
    # In versions with a Bridge, importing `transformer_lens.utils` warns.
    for module_name in (*_MODULES, *(_OF_BRIDGE if has_bridge() else _OF_2)):
        if importlib.util.find_spec(module_name) is not None:
            # Avoid getattr: TransformerLens 4 raises ImportError for names that it has dropped.
            attribute = vars(importlib.import_module(module_name)).get(name)
            if attribute is not None and not inspect.ismodule(attribute):
                return attribute
    return None


def check_target(patch: Patch) -> None:
    """Check that a patch's target exists, and has the parameters that the replacement expects."""
    target = named(patch.owner or patch.name)
    if patch.owner:
        target = getattr(target, patch.name, None)
    if target is None:
        fault = f"transformer_lens {installed()} has no {patch.target}, which tl_devicefix replaces"
    else:
        is_property = isinstance(target, property)
        function = target.fget if is_property else getattr(target, "__func__", target)
        parameters = list(inspect.signature(inspect.unwrap(function)).parameters)
        if tuple(name for name in parameters if name in patch.parameters) == patch.parameters:
            return
        fault = (
            f"{patch.target} of transformer_lens {installed()} takes ({', '.join(parameters)}), "
            f"not the ({', '.join(patch.parameters)}, ...) that tl_devicefix knows"
        )
    raise UnsupportedTransformerLens(
        f"{fault}; nothing was replaced: install a version with {SUPPORTED}"
    )

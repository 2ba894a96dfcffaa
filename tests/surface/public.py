"""What is public in the installed TransformerLens, by inspection: what is new shows by itself."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from transformer_lens import ActivationCache, FactoredMatrix, SVDInterpreter
from transformer_lens.hook_points import HookPoint

RESULTS = (ActivationCache, FactoredMatrix, SVDInterpreter, HookPoint)
"""The classes of what a model returns, or is made of."""
SPECIAL = (
    *("__getitem__", "__iter__", "__len__"),
    *("__matmul__", "__rmatmul__", "__mul__", "__rmul__"),
)
"""Methods with a protocol's name that users call by its syntax."""


def public_names(classes: Sequence[type], modules: Sequence[str]) -> list[str]:
    """Every public method, property and function, as "HookedTransformer.W_Q" or "train.train".

    Args:
        classes: whose methods and properties.
        modules: of transformer_lens, whose functions and classes; those that it lacks are left out.
    """
    names = [f"{cls.__name__}.{name}" for cls in classes for name in _own(cls)]
    for path in modules:
        try:
            module = importlib.import_module(f"transformer_lens.{path}")
        except ModuleNotFoundError:
            continue
        names += [f"{path.rpartition('.')[2]}.{name}" for name in _defined_in(module)]
    return names


def _own(cls: type) -> list[str]:
    """What TransformerLens defines on a class; not what it inherits from torch."""
    return [
        name
        for name in dir(cls)
        if (not name.startswith("_") or name in SPECIAL)
        and _owner(cls, name).__module__.startswith("transformer_lens")
    ]


def _owner(cls: type, name: str) -> type:
    return next(base for base in cls.__mro__ if name in vars(base))


def _defined_in(module: ModuleType) -> list[str]:
    """The functions and classes of a module; those of a package are what it exports."""
    if hasattr(module, "__path__"):
        return list(module.__all__)

    def is_its_own(value: Any) -> bool:
        if isinstance(value, type):
            return value.__module__ == module.__name__
        # `partial`s are patching functions; functions may be replaced by tl_devicefix's.
        function = getattr(value, "func", value)
        return inspect.isfunction(function) and function.__module__.startswith(
            ("transformer_lens", "tl_devicefix")
        )

    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and is_its_own(value) and not _is_imported(module, name, value)
    ]


def _is_imported(module: ModuleType, name: str, value: Any) -> bool:
    """Whether a function is another module's, merely imported here."""
    function = getattr(value, "func", value)
    return not isinstance(value, type) and function.__module__ not in (
        module.__name__,
        "tl_devicefix.hooked_transformer.moving",
    )

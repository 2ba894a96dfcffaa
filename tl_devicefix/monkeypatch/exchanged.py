"""Functions of torch, einops and TransformerLens that somebody exchanged since they were imported,
as by `torch.nn.functional.softmax = mine`: other ranks know nothing of them.
"""

from __future__ import annotations

import sys
from types import FunctionType, ModuleType
from typing import Any

import einops
import torch
import transformer_lens.hook_points  # noqa: F401  # and with it all components

PACKAGES = ("torch", "transformer_lens", "tl_devicefix", "transformers", "numpy", "einops")
"""Those of which blocks are made, beside Python itself: of one version on all ranks."""
_PACKAGES = {*sys.stdlib_module_names, *PACKAGES} - {"__main__"}


def _package(module: str) -> str:
    return module.partition(".")[0]


def _written_in(function: FunctionType) -> str:
    return str(function.__globals__.get("__name__"))


def _is_of_packages(function: FunctionType) -> bool:
    """Whether a function is of these packages, by its claimed and its real module."""
    return {_package(str(function.__module__)), _package(_written_in(function))} <= _PACKAGES


class _Functions:
    """Functions of a module, or methods of a class, as they were at first."""

    def __init__(self, of: ModuleType | type) -> None:
        self._of = of
        self._is_class = isinstance(of, type)
        self._name = f"{of.__module__}.{of.__name__}" if isinstance(of, type) else of.__name__
        self._first = self._now()
        if _package(self._name) == "torch":  # what is not torch's was exchanged before this
            for name, function in self._first.items():
                if isinstance(function, FunctionType) and not _is_of_packages(function):
                    self._first[name] = None
        self._seen: tuple[Any, list[str]] = None, []

    def exchanged(self) -> list[str]:
        """Names of functions that have been replaced since."""
        namespace = vars(self._of)
        values = tuple(namespace.values() if self._is_class else map(namespace.get, self._first))
        seen, names = self._seen
        if values != seen:
            now = self._now()
            names = [
                f"{self._name}.{name}"
                for name, first in self._first.items()
                if now.get(name) is not first and not _is_ours(now.get(name), name)
            ]
            self._seen = values, names
        return names

    def _now(self) -> dict[str, Any]:
        bases = reversed(self._of.__mro__) if isinstance(self._of, type) else [self._of]
        return {
            name: value
            for base in bases
            for name, value in vars(base).items()
            if callable(value)
            and not isinstance(value, type)
            and (self._is_class or name[0] != "_")
        }


def _is_ours(value: Any, name: str) -> bool:
    """Whether it is a function that was put there by torch, by TransformerLens, or by us."""
    if not isinstance(value, FunctionType) or not _is_of_packages(value):
        return False
    return value.__name__ == name or _package(_written_in(value)) == "tl_devicefix"


def _namespaces() -> list[ModuleType | type]:
    """Where blocks find functions: torch, einops, their own modules, and those of their helpers."""
    own = [m for name, m in sys.modules.items() if name.startswith("transformer_lens.components")]
    functions = (
        value for m in own for value in vars(m).values() if isinstance(value, FunctionType)
    )
    helpers = {name for name in map(_written_in, functions) if _package(name) == "transformer_lens"}
    own += [sys.modules[name] for name in sorted(helpers - {m.__name__ for m in own})]
    modules = torch, torch.nn.functional, torch.linalg, torch.special, torch.fft, einops
    caches = (m for name, m in sys.modules.items() if name in _KV_CACHES)
    entries = [value for m in caches for value in vars(m).values() if isinstance(value, type)]
    return [
        *modules,
        torch.Tensor,
        *own,
        *(value for value in entries if _package(value.__module__) != "torch"),
    ]


_KV_CACHES = (
    "transformer_lens.cache.key_value_cache_entry",
    "transformer_lens.past_key_value_caching",  # of TransformerLens 2
)


_FUNCTIONS = list(map(_Functions, _namespaces()))


def exchanged_functions() -> tuple[str, ...]:
    """Functions that blocks may use and that are not what was imported: "torch.bmm", say."""
    return tuple(name for functions in _FUNCTIONS for name in functions.exchanged())

"""Functions of torch, einops and TransformerLens that somebody exchanged since they were imported,
as by `torch.nn.functional.softmax = mine`: other ranks know nothing of them.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Iterable
from types import FunctionType, ModuleType
from typing import Any

import einops
import torch
import transformer_lens.hook_points  # noqa: F401  # and with it all components

PACKAGES = ("torch", "transformer_lens", "tl_devicefix", "transformers", "numpy", "einops")
"""Those of which blocks are made, beside Python itself: of one version on all ranks."""
_PACKAGES = {*sys.stdlib_module_names, *PACKAGES} - {"__main__"}
_FOREIGN = "torch", "transformers"
_IMPORTED = frozenset(("accelerate", "huggingface_hub", "safetensors", "tqdm", "typing_extensions"))
"""Of which transformers imports functions, that no layer calls."""


def _package(module: str) -> str:
    return module.partition(".")[0]


def _written_in(function: FunctionType) -> str:
    return str(function.__globals__.get("__name__"))


def is_of_packages(definition: Any, others: frozenset[str] = frozenset()) -> bool:
    """Whether a function or class is of these packages, by its claimed and its real module."""
    modules = {_package(str(definition.__module__))}
    if hasattr(definition, "__globals__"):
        modules.add(_package(_written_in(definition)))
    return modules <= _PACKAGES | others


class _Functions:
    """Functions of a module, or methods of a class, as they were at first."""

    def __init__(self, of: ModuleType | type) -> None:
        is_class = isinstance(of, type)
        self._of = of
        self._name = f"{of.__module__}.{of.__name__}" if is_class else of.__name__
        self._first = {
            name: vars(of).get(name)  # None of what is inherited
            for name in (dir(of) if is_class else vars(of))
            if (is_class or name[0] != "_") and _is_function(getattr(of, name))
        }
        if _package(self._name) in _FOREIGN:  # what is of nobody known was exchanged before this
            for name, function in self._first.items():
                if isinstance(function, FunctionType) and not is_of_packages(function, _IMPORTED):
                    self._first[name] = self
        self._seen: tuple[Any, list[str]] = None, []

    def exchanged(self) -> list[str]:
        """Names of functions that have been replaced since."""
        values = tuple(map(vars(self._of).get, self._first))
        if values != self._seen[0]:
            pairs = zip(self._first.items(), values)
            self._seen = (
                values,
                [
                    f"{self._name}.{name}"
                    for (name, first), value in pairs
                    if value is not first and not _is_ours(value, name)
                ],
            )
        return self._seen[1]


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, type)


def _is_ours(value: Any, name: str) -> bool:
    """Whether it is a function that was put there by torch, by TransformerLens, or by us."""
    if not isinstance(value, FunctionType) or not is_of_packages(value):
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


@functools.cache
def functions_of(cls: type) -> frozenset[_Functions]:
    """Those that a class of transformers' or torch's uses, beside the ones that all blocks may."""
    classes = [base for base in cls.__mro__ if _package(base.__module__) in _FOREIGN]
    modules = {base.__module__ for base in classes if _package(base.__module__) == "transformers"}
    for name in tuple(modules):
        values = vars(sys.modules[name]).values()
        written = {_written_in(value) for value in values if isinstance(value, FunctionType)}
        modules |= {helper for helper in written if _package(helper) == "transformers"}
    return frozenset(map(_functions_in, (*classes, *map(sys.modules.get, modules))))


_functions_in = functools.cache(_Functions)


def exchanged_functions(others: Iterable[_Functions] = ()) -> tuple[str, ...]:
    """Functions that blocks may use and that are not what was imported: "torch.bmm", say."""
    all_functions = itertools.chain(_FUNCTIONS, others)
    return tuple(name for functions in all_functions for name in functions.exchanged())

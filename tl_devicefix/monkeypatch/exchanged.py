"""Functions of torch, einops and TransformerLens that somebody exchanged since they were imported,
as by `torch.nn.functional.softmax = mine`: other ranks know nothing of them.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Iterable, Mapping
from types import FunctionType, ModuleType
from typing import Any

import einops
import torch
import transformer_lens.hook_points  # noqa: F401  # and with it all components
from transformers.utils.generic import GeneralInterface

PACKAGES = ("torch", "transformer_lens", "tl_devicefix", "transformers", "numpy", "einops")
"""Those of which blocks are made, beside Python itself: of one version on all ranks."""
_PACKAGES = {*sys.stdlib_module_names, *PACKAGES} - {"__main__"}
_FOREIGN = "torch", "transformers"
_IMPORTED = frozenset(
    ("accelerate", "huggingface_hub", "jaxtyping", "safetensors", "tqdm", "typing_extensions")
)
"""Of which transformers and TransformerLens have functions that compute nothing of a layer."""


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
    """Functions of a module, a class or a registry, which has this name, as they were at first.

    They `are_known` where they are what they were at import, as nobody had time to change them.
    """

    def __init__(
        self, name: str, space: Mapping[str, Any], names: Iterable[str], are_known: bool
    ) -> None:
        self._name, self._space = name, space
        self._first = {name: space.get(name) for name in names}  # None of what is inherited
        if not are_known:
            for name, function in self._first.items():
                if not _is_known(function):
                    self._first[name] = self
        self._seen: tuple[Any, list[str]] = None, []

    def exchanged(self) -> list[str]:
        """Names of functions that have been replaced since."""
        values = tuple(map(self._space.get, self._first))
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


@functools.cache
def _functions_in(of: Any) -> _Functions:
    """Those of a module, or of a class."""
    is_class = isinstance(of, type)
    names = [
        name
        for name in (dir(of) if is_class else vars(of))
        if (is_class or name[0] != "_") and _is_function(getattr(of, name))
    ]
    name = f"{of.__module__}.{of.__name__}" if is_class else of.__name__
    are_known = _package(name) not in _FOREIGN and not is_class
    return _Functions(name, vars(of), names, are_known)


_registered: dict[int, list[_Functions]] = {}
"""By the id of a registry's own mapping, which they keep."""


def _registered_in(registry: Any) -> list[_Functions]:
    """Those of a registry of transformers', as of attention."""
    spaces = registry._local_mapping, registry._global_mapping
    if id(spaces[0]) not in _registered:
        name = f"transformers.{type(registry).__name__}"
        names = [*registry, "eager"]  # which is a modeling file's own, if it is none of a registry
        _registered[id(spaces[0])] = [_Functions(name, space, names, False) for space in spaces]
    return _registered[id(spaces[0])]


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, type)


def _is_known(value: Any) -> bool:
    """Whether something that is called as a function is of the packages."""
    value = value.func if isinstance(value, functools.partial) else value
    definition = value if hasattr(value, "__qualname__") else type(value)
    is_builtin = getattr(definition, "__module__", None) is None
    return is_builtin or is_of_packages(definition, _IMPORTED)


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


_FUNCTIONS = list(map(_functions_in, _namespaces()))


def functions_of(classes: Iterable[type]) -> frozenset[_Functions]:
    """Those that these classes use, beside the ones that all blocks may."""
    return frozenset[_Functions]().union(*map(_functions_of, classes))


@functools.cache
def _functions_of(cls: type) -> frozenset[_Functions]:
    watched = (*_FOREIGN, "transformer_lens")
    classes = [base for base in cls.__mro__ if _package(base.__module__) in watched]
    names = {base.__module__ for base in classes if _package(base.__module__) == "transformers"}
    values = [value for name in names for value in vars(sys.modules[name]).values()]
    registries = [value for value in values if isinstance(value, GeneralInterface)]
    values += [value for registry in registries for value in registry.values()]
    names |= {_written_in(value) for value in values if isinstance(value, FunctionType)}
    modules = [sys.modules[name] for name in names if _package(name) == "transformers"]
    registered = map(_registered_in, registries)
    return frozenset(map(_functions_in, (*classes, *modules))).union(*registered)


def exchanged_functions(others: Iterable[_Functions] = ()) -> tuple[str, ...]:
    """Functions that blocks may use and that are not what was imported: "torch.bmm", say."""
    all_functions = itertools.chain(_FUNCTIONS, others)
    return tuple(name for functions in all_functions for name in functions.exchanged())

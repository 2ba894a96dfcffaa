"""Optional libraries that a given model may use: recognised without importing them."""

from __future__ import annotations

import importlib
from typing import Any


def is_from(package: str, thing: object) -> bool:
    """Whether an object is an instance of a class of that package."""
    return any(kind.__module__.partition(".")[0] == package for kind in type(thing).__mro__)


def required(name: str) -> Any:
    """Import a module of an optional dependency.

    Raises:
        ImportError: naming the extra to install.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ImportError(
            f"hf_model uses {package}, which cannot be imported ({error}); pip install {package}"
        ) from error

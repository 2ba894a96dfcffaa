"""The version of the installed TransformerLens, and the model classes that it has."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterable
from functools import cache

from packaging.version import Version

SUPPORTED = "2.16.1 <= transformer_lens < 5"


class UnsupportedTransformerLens(ImportError):
    """Raised if the installed TransformerLens cannot be patched; the message says why."""


@cache  # each load calls this, and the version is read from a file
def installed() -> Version:
    """Return the version of TransformerLens."""
    return Version(importlib.metadata.version("transformer_lens"))


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of packages."""
    return {name: _version(name) for name in packages}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # a source tree on the path has no metadata
        return str(importlib.import_module(package).__version__)


@cache
def has_hooked_transformer() -> bool:
    """Return True if HookedTransformer exists, which 4.0 removed."""
    return importlib.util.find_spec("transformer_lens.HookedTransformer") is not None


def has_bridge() -> bool:
    """Return True if there is a TransformerBridge that can be patched: from 3.9 on."""
    return installed() >= Version("3.9.dev0")


def check_version() -> None:
    """Check that the installed TransformerLens is a supported version."""
    if not Version("2.16.1") <= installed() < Version("5.dev0"):
        raise UnsupportedTransformerLens(
            f"tl_devicefix needs {SUPPORTED}, but {installed()} is installed: install "
            "'transformer_lens>=2.16.1,<5'"
        )

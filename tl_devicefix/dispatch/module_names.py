"""The modules of a model, each once, by the name that users know it by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from tl_devicefix.monkeypatch.versions import is_bridge

WRAPPED = "_original_component"
"""A Bridge's component holds the Hugging Face module that it wraps by this name."""


def named_modules(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """As `model.named_modules()`.

    A Bridge has its components among the modules of the Hugging Face model too: here they go by
    their own names ("blocks.3.attn.q"), and what a component wraps goes by the component's. What
    of the Hugging Face model is in no component is at the end ("original_model.model").
    """
    if not is_bridge(model):
        yield from model.named_modules()
        return
    paths: dict[nn.Module, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        known = paths.setdefault(module, path)
        if _depth(path) < _depth(known):
            paths[module] = path
    modules = {path: module for module, path in paths.items()}
    for module, path in paths.items():
        yield _as_known(path, modules), module
    for path, module in model.original_model.named_modules():
        if module not in paths:
            yield f"original_model.{path}".rstrip("."), module


def _as_known(path: str, modules: Mapping[str, nn.Module]) -> str:
    """A path without the steps into wrapped modules, unless another module goes by that name."""
    of_component = path.removesuffix(f".{WRAPPED}")
    short = of_component.replace(f".{WRAPPED}", "")
    return path if short != of_component and short in modules else short


def _depth(path: str) -> tuple[int, int]:
    return path.count(WRAPPED), len(path)

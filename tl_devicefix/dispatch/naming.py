"""The names that users know: a tensor's Python expression, a module's name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from keyword import iskeyword

from torch import nn

from tl_devicefix.types import Model

WRAPPED = "_original_component"
"""The attribute of a Bridge's component that is the Hugging Face module it wraps."""


def expression(path: str) -> str:
    """Return the Python expression for a name in a model."""
    written = "model"
    for part in path.split(".") if path else ():
        if part.isdigit():
            written += f"[{part}]"
        elif iskeyword(part):  # such as a Bridge's `mlp.in`
            written = f"getattr({written}, {part!r})"
        elif part.isidentifier():
            written += f".{part}"
        else:  # a key of an nn.ModuleDict
            written += f"[{part!r}]"
    return written


def join_path(path: str, name: str) -> str:
    """Join a module's name and a name within it."""
    return f"{path}.{name}" if path else name


def list_names(names: Sequence[str]) -> str:
    """List names: ["W_in", "b_in"] -> "W_in, b_in"; only the first few of many."""
    if len(names) <= 4:
        return ", ".join(names)
    return f"{', '.join(names[:3])} and {len(names) - 3} more"


def by_shortest_name(model: nn.Module, is_one: Callable[[nn.Module], bool]) -> dict[str, nn.Module]:
    """Return the modules that `is_one` accepts, by their shortest names."""
    # A Bridge's module may have several names, and the shortest is not always the first.
    names: dict[nn.Module, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if is_one(module):
            names[module] = min(names.get(module, name), name, key=len)
    return {name: module for module, name in names.items()}


def named_modules(model: Model) -> Iterator[tuple[str, nn.Module]]:
    """Yield names and modules like `model.named_modules()`.

    A Bridge's component gets its own name ("blocks.3.attn.q"), although it is also in the Hugging
    Face model, and the module that it wraps gets the same name. Other modules of the Hugging Face
    model come last ("original_model.model").
    """
    hf_model = getattr(model, "original_model", None)
    if hf_model is None:
        yield from model.named_modules()
        return
    modules = by_shortest_name(model, lambda _: True)
    for path, module in modules.items():
        yield _as_known(path, modules), module
    known = set(modules.values())
    for path, module in hf_model.named_modules():
        if module not in known:
            yield f"original_model.{path}".rstrip("."), module


def _as_known(path: str, modules: Mapping[str, nn.Module]) -> str:
    """Return a path without `_original_component`, unless another module has that name."""
    component_path = path.removesuffix(f".{WRAPPED}")
    short = component_path.replace(f".{WRAPPED}", "")
    return path if short != component_path and short in modules else short


def each_module(*roots: nn.Module) -> Iterator[nn.Module]:
    """Yield modules and those in them, each once, in no fixed order.

    `modules()` yields them in order, which takes ten times as long for a model of 80 blocks.
    """
    seen, to_see = set(roots), list(dict.fromkeys(roots))
    while to_see:
        module = to_see.pop()
        yield module
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                to_see.append(child)

"""`fuse_blocks(model)` and `unfuse_blocks(model)`: run each block as one function of its weights.

Fusing changes a module's class to a subclass with another `forward`. Copies, pickles and views of
the module are then fused too, and models that are not fused pay nothing.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType
from typing import Any, SupportsIndex

import torch
from torch import nn

from tl_devicefix.around import innermost
from tl_devicefix.fusing.listening import IN_VIEW
from tl_devicefix.monkeypatch.applying import is_enabled
from tl_devicefix.monkeypatch.patch import owner_of, package_of

BOUND = "_tl_devicefix_bound"
"""A fused module's attribute that caches facts about it. Copies do not get it."""
_WHY_NOT = "_tl_devicefix_why_not_fused"
"""The attribute of modules that were asked to fuse: the reason why they cannot, or None."""

KINDS: list[type[Fused]] = []
"""Mixins for the modules that can be fused; each class of models adds its own."""


class Fused(nn.Module):
    """Mixin for the class of a fused module, placed before TransformerLens's class.

    A subclass implements the class methods and `forward`, which calls `super().forward` if
    `is_enabled()` is False, and for everything that it cannot compute itself.
    """

    _unfused: type[nn.Module]

    @classmethod
    def fits(cls, module: nn.Module) -> bool:
        """Return True if this is the mixin for a module."""
        raise NotImplementedError

    @classmethod
    def is_block(cls, module: nn.Module) -> bool:
        """Return True if a module is a block, which gets a line in `report`."""
        return cls.fits(module)

    @classmethod
    def why_not(cls, module: nn.Module) -> str | None:
        """Return why a module would run TransformerLens's forward now; None if it would not."""
        raise NotImplementedError

    @classmethod
    def why_pattern(cls, module: nn.Module) -> str | None:
        """Return why a fused block builds a pattern even without hooks; None if it builds none."""
        raise NotImplementedError

    @classmethod
    def prepare(cls, module: nn.Module) -> str | None:
        """Get a module ready to be fused; return why it cannot be, or None."""
        raise NotImplementedError

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        # pickle looks classes up by name, and ours has the name of the original.
        state = {name: value for name, value in vars(self).items() if name != BOUND}
        return _made, (type(self).__mro__[1], self._unfused), state

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Fused:
        vars(self).pop(BOUND, None)  # it may hold weights that are about to be replaced
        return super()._apply(fn, recurse)


def why_replaced(classes: Iterable[type]) -> str | None:
    """Return which method of these TransformerLens classes a user has replaced, if any."""
    for cls in classes:
        if not cls.__module__.startswith("transformer_lens."):
            continue
        for name, value in vars(cls).items():
            if isinstance(value, FunctionType):
                owner = owner_of(value)
                if owner != cls.__module__ and not owner.startswith("tl_devicefix."):
                    return f"{cls.__name__}.{name} was replaced"
    return None


def own_method(module: nn.Module) -> str | None:
    """Return the name of a method that a user has replaced on this instance, if any."""
    for name, value in vars(module).items():
        value = innermost(value)
        if callable(value) and not isinstance(value, nn.Module):
            is_method = isinstance(getattr(type(module), name, None), (FunctionType, property))
            if is_method and package_of(value) != "tl_devicefix":
                return name
    return None


def _made(mixin: type, kind: type) -> nn.Module:
    return object.__new__(_fused_class(mixin, kind))


@functools.cache
def _fused_class(mixin: type, kind: type) -> Any:
    # Other code recognises TransformerLens's classes by their names.
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "_unfused": kind}
    return type(kind.__name__, (mixin, kind), named)


def class_of(module: object) -> Any:
    """Return a module's class; for a fused module, the class that it had before."""
    return getattr(type(module), "_unfused", type(module))


def fuse_blocks(model: nn.Module) -> None:
    """Run each block of a model as one function of its weights, which takes less time.

    A fused block builds no attention scores and no pattern, so memory grows with the tokens and not
    with their square. If a hook looks inside a block, TransformerLens's own forward runs. Weights,
    config flags, training mode and modules that you assign take effect from the next block on. If
    you replace a method, function, class or `forward`, fuse again. Numbers equal TransformerLens's
    to float32 rounding, not to the bit; rows of padding that see no token may differ.

        tl_devicefix.fuse_blocks(model)
        tl_devicefix.report(model)  # each block: fused, or why not

    A HookedTransformer needs TransformerLens 3.8, and a Bridge 4.0. Older blocks, and users' own,
    stay as they are; if no block is fused, a warning says why. Fused attention has no second
    derivatives: unfuse before you differentiate twice.

    Args:
        model: a HookedTransformer or a TransformerBridge, on any devices; or a block.

    Raises:
        TypeError: if `model` is not a module.
    """
    if not isinstance(model, nn.Module):
        given = f"fuse_blocks takes a model, but this is a {type(model).__name__}"
        raise TypeError(f"{given}: give a HookedTransformer or a TransformerBridge")
    modules = list(fusable(model))
    for module in modules:
        set_fused(module, True)
    blocks = list(filter(is_known_block, modules)) or modules
    if (why := _why_no_block(model, blocks)) is not None:
        warnings.warn(f"fuse_blocks fuses no block: {why}", stacklevel=2)


def _why_no_block(model: nn.Module, blocks: list[nn.Module]) -> str | None:
    """Return why none of a model's blocks is fused; None if one is."""
    if not is_enabled():
        return "TransformerLens is unpatched: call tl_devicefix.enable() first"
    if not blocks:
        given = f"a {type(model).__name__} has no block of TransformerLens's"
        return f"{given}: load it as a HookedTransformer or a TransformerBridge"
    if any(report_of(block).startswith("fused") for block in blocks):
        return None
    return report_of(blocks[0]).removeprefix("not fused: ")


def unfuse_blocks(model: nn.Module) -> None:
    """Run TransformerLens's own forward again in each block of a model.

    Args:
        model: as `fuse_blocks` takes it.
    """
    for module in fusable(model):
        set_fused(module, False)


def fusable(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules that can be fused; raise in a run in flight."""
    if IN_VIEW in vars(model):
        raise RuntimeError(
            "a run in flight may not fuse or unfuse blocks of its view, which later runs get: do "
            "so before pipeline_map, or pass max_in_flight=1"
        )
    if kind_of(model) is not None:
        yield model
    else:
        for child in model.children():
            yield from fusable(child)


def kind_of(module: nn.Module) -> type[Fused] | None:
    """Return the mixin for a module; None if it cannot be fused."""
    return next((kind for kind in KINDS if kind.fits(module)), None)


def is_known_block(module: nn.Module) -> bool:
    """Return True if a module is one of TransformerLens's blocks."""
    return any(kind.is_block(module) for kind in KINDS)


def is_fused(module: nn.Module) -> bool:
    """Return True if a block was asked to run fused, here or on its host."""
    return _WHY_NOT in vars(module)


def set_fused(module: nn.Module, asked: bool) -> None:
    """Fuse or unfuse a module; for a block on another host, only record the request."""
    attributes, unfused = vars(module), class_of(module)
    kind: Any = None if hasattr(unfused, "is_remote") else kind_of(module)
    attributes.pop(BOUND, None)  # fusing again has to find replaced methods
    attributes.pop(_WHY_NOT, None)
    why = kind.prepare(module) if asked and kind is not None else None
    if asked:
        attributes[_WHY_NOT] = why
    if kind is not None:
        module.__class__ = _fused_class(kind, unfused) if asked and why is None else unfused


def report_of(module: nn.Module) -> str:
    """Return a block's line in `report`: fused, with a pattern, or not fused; and why."""
    if not is_fused(module):
        return "not fused"
    if not is_enabled():
        return "not fused: TransformerLens is unpatched"
    if hasattr(class_of(module), "is_remote"):
        return "fused"
    kind: Any = kind_of(module)
    why = vars(module)[_WHY_NOT] or kind.why_not(module)
    if why is not None:
        return f"not fused: {why}"
    pattern = kind.why_pattern(module)
    return "fused" if pattern is None else f"fused, with a pattern: {pattern}"


def applies_dropout(module: nn.Module) -> bool:
    """Return True if a module is in training mode and has a dropout rate above 0."""
    if not module.training:
        return False
    rates = [value for name, value in vars(module).items() if "dropout" in name]
    if isinstance(module, nn.modules.dropout._DropoutNd):
        rates.append(module.p)
    return any(isinstance(rate, (int, float)) and rate > 0 for rate in rates)

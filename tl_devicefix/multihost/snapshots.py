"""Whether a block still is what it was: nothing set in it, no module or tensor exchanged."""

from __future__ import annotations

import weakref
from operator import eq, is_
from typing import Any

import torch
from torch import nn
from transformer_lens.hook_points import HookPoint

from tl_devicefix.multihost.caching import is_caching, points_of
from tl_devicefix.multihost.classes import SeenClasses

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Where a module has its hooks."""
_HELD_IN = ("_parameters", "_buffers", "_modules")


class Snapshot:
    """What is set in a block and its modules: which objects, not what is in them.

    It is asked for each block of each forward, so that loops are left to `map`.

    Args:
        block: a module with a `cfg`, all of whose tensors are on one device.

    Attributes:
        tensors: what `tensors_of` gives.
        classes: of its modules.
    """

    def __init__(self, block: Any) -> None:
        self._block = weakref.ref(block)  # or what is held for it would hold it
        self._modules = list(block.modules())[1:]
        self._classes = [type(block), *map(type, self._modules)]
        self.classes = SeenClasses([*self._classes, type(block.cfg)])
        self._attributes = Attributes(block)
        self.tensors = tensors_of(block)
        self._lying = list(map(_Lying, self.tensors))
        self._hooks = hooks_within(block)
        #: Its hook points, in order.
        self.points = points_of(block)
        self._of_points = [vars(each)["_forward_hooks"] for each in self.points]

    @property
    def name(self) -> str:
        """Of the block, as its hook points say it: "blocks.3", or "blocks.3.attn"."""
        block: Any = self._block()
        points = ((name, each) for name, each in block.named_modules() if type(each) is HookPoint)
        name, point = next(points, ("", None))
        return str(getattr(point, "name", None) or type(block).__name__).removesuffix(f".{name}")

    def listened(self) -> tuple[int, ...] | None:
        """To which hook points caching hooks listen now; None if any other hook is there."""
        if not any(self._hooks):
            return ()
        found = tuple(index for index, each in enumerate(self._of_points) if each)
        hooks = [hook for index in found for hook in self._of_points[index].values()]
        is_all = sum(map(len, self._hooks)) == len(hooks) and all(map(is_caching, hooks))
        return found if is_all else None

    def holds(self) -> bool:
        """Whether it all is as it was."""
        return (
            self._attributes.hold()
            and [type(self._block()), *map(type, self._modules)] == self._classes
            and all(map(_Lying.holds, self._lying, self.tensors))
            and self.classes.holds()
        )


class Attributes:
    """What is set in a block's modules and its `cfg`.

    Args:
        block: a module with a `cfg`.
    """

    def __init__(self, block: Any) -> None:
        modules = list(block.modules())
        points = [vars(each) for each in modules if type(each) is HookPoint]
        dicts = [vars(each) for each in modules if type(each) is not HookPoint]
        dicts += [vars(each)[name] for each in modules for name in _HELD_IN]
        configs = [getattr(each, "cfg", None) for each in modules]
        dicts += [vars(each) for each in {id(e): e for e in configs if e is not None}.values()]
        self._dicts = [(each, tuple(each), tuple(each.values())) for each in dicts if each]
        self._empty = [each for each in dicts if not each]
        # What a point says of itself is no matter as long as nothing more is set in it.
        self._points, self._lengths = points, list(map(len, points))

    def hold(self) -> bool:
        """Whether they all are the same objects."""
        return (
            all(map(_is_same, self._dicts))
            and not any(self._empty)
            and list(map(len, self._points)) == self._lengths
        )


def _is_same(seen: tuple[dict[str, Any], tuple[str, ...], tuple[Any, ...]]) -> bool:
    there, names, values = seen
    return (
        len(there) == len(names)
        and all(map(is_, there.values(), values))
        and all(map(eq, there, names))
    )


class _Lying:
    """Where a tensor lies: `tensor.data = ...` may change that within its storage, too."""

    __slots__ = ("_allocation", "_cpu", "_offset", "_shape", "_stride")

    def __init__(self, tensor: Any) -> None:
        self._allocation, self._cpu = tensor._allocation, tensor._cpu
        self._offset = tensor._cpu.storage_offset()
        self._shape, self._stride = tensor._cpu.shape, tensor._cpu.stride()

    def holds(self, tensor: Any) -> bool:
        """Whether it lies there still."""
        cpu = self._cpu
        return (
            tensor._cpu is cpu
            and tensor._allocation is self._allocation
            and cpu.stride() == self._stride
            and cpu.storage_offset() == self._offset
            and cpu.shape == self._shape
        )


def hooks_within(block: nn.Module) -> list[Any]:
    """Every dict of hooks within a block, but of its own."""
    inner = (vars(each) for each in block.modules() if each is not block)
    return [each[name] for each in inner for name in HOOKS]


def has_forward_within(block: nn.Module) -> bool:
    """Whether a module of a block has a forward of the user's."""
    return any("forward" in vars(each) for each in block.modules() if each is not block)


def tensors_of(module: nn.Module) -> list[torch.Tensor]:
    """Parameters, buffers, and what else is set in modules; one that is used twice twice."""
    return [
        each
        for one in module.modules()
        if type(one) is not HookPoint
        for each in (*one._parameters.values(), *one._buffers.values(), *vars(one).values())
        if isinstance(each, torch.Tensor)
    ]

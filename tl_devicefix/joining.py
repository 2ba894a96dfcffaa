"""Torch functions that mix a model's devices: their arguments are brought together.

What torch does with several devices itself (`copy_`, `view_as`, indexing by a number) stays as
torch does it. Where torch refuses, the function is called again with its arguments on one device,
and what it changed there is written back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class JoinedAt(TorchFunctionMode):
    """Within it, torch functions that mix a model's devices bring their arguments together.

    What is changed in place, or by `out=`, stays where it is: the others come to it.

    Args:
        device: where to, if nothing is changed in place.
        devices: the model's; a tensor of another device is left alone, and torch says so.
    """

    def __init__(self, device: torch.device, devices: frozenset[torch.device]) -> None:
        super().__init__()
        self._device = device
        self._devices = devices

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = list(tensors_in((args, kwargs)))
        if len({tensor.device for tensor in tensors} & self._devices) < 2:
            return func(*args, **kwargs)
        versions = [_version(tensor) for tensor in tensors]
        try:
            return func(*args, **kwargs)
        except RuntimeError:
            if versions != [_version(tensor) for tensor in tensors]:
                raise  # it has changed something already, and would change it twice
        changed = _changed_in_place(func, args, kwargs)
        together = _Together(self._device if changed is None else changed.device, self._devices)
        result = func(*together.join(args), **together.join(kwargs))
        return together.part(result, getattr(func, "__name__", "") in _UNCOUNTED)


class _Together:
    """Arguments of one call, brought to a device, and what they were.

    Args:
        target: where to.
        devices: from where.
    """

    def __init__(self, target: torch.device, devices: frozenset[torch.device]) -> None:
        self._target = target
        self._others = devices - {target}
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor, int | None]] = {}

    def join(self, value: Any) -> Any:
        """The arguments, on the target; the same tensor is copied once."""
        if isinstance(value, torch.Tensor) and value.device in self._others:
            if id(value) not in self._copies:
                copy = value.to(self._target)
                self._copies[id(value)] = (value, copy, _version(copy))
            return self._copies[id(value)][1]
        return _map(value, self.join)

    def part(self, result: Any, uncounted: bool) -> Any:
        """The result, after what was changed in copies is written back.

        That is `out=` in a tuple, lists that `torch._foreach_*_` changes, running statistics.
        """
        for original, copy, version in self._copies.values():
            if _version(copy) != version or (uncounted and not copy.requires_grad):
                original.copy_(copy)
        originals = {id(copy): original for original, copy, _ in self._copies.values()}
        return originals.get(id(result), result)


_UNCOUNTED = frozenset({"batch_norm", "instance_norm"})
"""Their running statistics change without torch counting it."""


def _map(value: Any, change: Callable[[Any], Any]) -> Any:
    """Plain tuples, lists and dicts with each entry changed."""
    if type(value) in (tuple, list):
        return type(value)(change(each) for each in value)
    if type(value) is dict:
        return {key: change(each) for key, each in value.items()}
    return value


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested arguments."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from tensors_in(each)
    elif isinstance(value, dict):
        yield from tensors_in(tuple(value.values()))


def _version(tensor: torch.Tensor) -> int | None:
    """How often a tensor has been changed; torch does not count it under `inference_mode`."""
    return None if tensor.is_inference() else tensor._version


def _changed_in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The tensor that a torch function changes, as its name or `out` says; None if it does not."""
    name = getattr(func, "__name__", "")
    if "out" in kwargs:
        return next(tensors_in(kwargs["out"]), None)
    if name.startswith("__"):  # __set__ is that of an attribute, such as `grad`
        in_place = name in ("__setitem__", "__set__") or name.startswith("__i")
    else:
        in_place = name.endswith("_")
    first = args[0] if args else kwargs.get("input", kwargs.get("self"))
    return next(tensors_in(first), None) if in_place else None

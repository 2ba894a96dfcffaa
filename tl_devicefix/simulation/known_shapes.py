"""Shapes that operations gave before: the blocks of a model are alike, and torch's rules are slow.

For tensors without values, most of an operation's time is torch's Python that finds out the shape,
strides and dtype of the result. They depend on nothing but those of the arguments.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import suppress
from typing import Any

import torch

from tl_devicefix.simulation.geometry import Geometry, geometry_of

_Operation = torch._ops.OpOverload

_known: dict[Hashable, list[Geometry]] = {}
_MOST = 10_000  # of several models; then they are forgotten
_PLAIN = (int, float, bool, str, torch.dtype, torch.layout, torch.memory_format, torch.device)


def call_without_values(func: _Operation, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Call an operation on meta tensors, or make what it gave when it was called so before."""
    if func._schema.is_mutable or func.is_view:  # these are fast, and their results are not new
        return func(*args, **kwargs)
    try:
        key = _key_of(func, args, kwargs)
    except _NotKnownBy:
        return func(*args, **kwargs)
    known = _known.get(key)
    if known is not None:
        made = [
            torch.empty_strided(size, stride, dtype=dtype, device="meta")
            for size, stride, dtype in known
        ]
        return made[0] if len(func._schema.returns) == 1 else tuple(made)
    result = func(*args, **kwargs)
    _remember(key, args, kwargs, result)
    return result


def remember(func: _Operation, args: list[Any], kwargs: dict[str, Any], result: Any) -> None:
    """Let what an operation gave elsewhere be known, as torch's own rules refuse it."""
    if not func._schema.is_mutable:
        with suppress(_NotKnownBy):
            _remember(_key_of(func, args, kwargs), args, kwargs, result)


def _remember(key: Hashable, args: list[Any], kwargs: dict[str, Any], result: Any) -> None:
    found = result if isinstance(result, tuple) else (result,)
    if all(_is_new(each, args, kwargs) for each in found):
        if len(_known) >= _MOST:
            _known.clear()
        _known[key] = [geometry_of(each) for each in found]


class _NotKnownBy(Exception):
    """An argument that does not tell by its value what an operation gives."""


def _key_of(func: _Operation, args: list[Any], kwargs: dict[str, Any]) -> Hashable:
    return (func, *map(_key, args), *((name, _key(kwargs[name])) for name in sorted(kwargs)))


def _key(value: Any) -> Hashable:
    kind = type(value)
    if value is None or kind in _PLAIN:
        return kind, value  # as 1 == 1.0 == True
    if kind is torch.Tensor and value.is_meta:
        return value.size(), value.stride(), value.dtype
    if kind is list or kind is tuple:
        return tuple(map(_key, value))
    raise _NotKnownBy


def _is_new(result: Any, args: list[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a result is a strided tensor with memory of its own, all of which it uses."""
    if type(result) is not torch.Tensor or result.layout is not torch.strided:
        return False
    storage = result.untyped_storage()
    given = (each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor))
    return (
        not (result.storage_offset() or result.is_conj() or result.is_neg())
        and storage.nbytes() == geometry_of(result).nbytes
        and all(each.untyped_storage()._cdata != storage._cdata for each in given)
    )

"""What an operation will give, before it has run: shapes, strides and dtypes.

It is run on zeros of the same geometry, on the CPU, and what that gives is remembered. So strides
are those of the CPU's kernel, and so are the errors about shapes and dtypes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch


class Tensors:
    """The tensors among an operation's arguments, each once, in order.

    Args:
        args: its arguments, with lists of tensors among them.
        kwargs: those given by name.
    """

    def __init__(self, args: Any, kwargs: dict[str, Any]) -> None:
        self.all: list[torch.Tensor] = []
        self._index: dict[int, int] = {}
        self._args, self._kwargs = args, kwargs
        self.key = (self._describe(args), self._describe(tuple(kwargs.items())))
        """What tells one call's geometry from another's."""

    def _describe(self, arg: Any) -> Any:
        if isinstance(arg, torch.Tensor):
            index = self._index.setdefault(id(arg), len(self.all))
            if index == len(self.all):
                self.all.append(arg)
            return index, arg.shape, arg.stride(), arg.dtype, arg.is_conj(), arg.is_neg()
        if isinstance(arg, (list, tuple)):
            return type(arg), tuple(self._describe(each) for each in arg)
        return type(arg), arg

    def arguments(self, tensors: list[torch.Tensor]) -> tuple[Any, dict[str, Any]]:
        """The arguments, with other tensors in the place of these."""

        def exchange(arg: Any) -> Any:
            if isinstance(arg, torch.Tensor):
                return tensors[self._index[id(arg)]]
            if isinstance(arg, (list, tuple)):
                return [exchange(each) for each in arg]
            return arg

        kwargs = {name: exchange(arg) for name, arg in self._kwargs.items()}
        return [exchange(arg) for arg in self._args], kwargs


class Geometry(NamedTuple):
    """The shape, strides and dtype of a tensor."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of a storage that just holds it."""
        if 0 in self.shape:
            return 0
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.stride))
        return (last + 1) * self.dtype.itemsize


class NoSparseTensors(NotImplementedError):
    """An operation gives a tensor that is not strided."""


class Given(NamedTuple):
    """A result that is one of the tensors given, by its index among them."""

    number: int


class Outcome(NamedTuple):
    """What an operation gives, and which of the tensors given to it have got another geometry.

    ``result`` has a `Geometry` for each tensor that is made.
    """

    result: Any
    resized: dict[int, Geometry]


_known: dict[Any, Outcome] = {}
_MOST = 10_000  # of several models; then they are forgotten


def outcome(func: Callable[..., Any], tensors: Tensors) -> Outcome:
    """Tell what an operation gives.

    Raises:
        NoSparseTensors: if it gives a sparse tensor.
        Exception: what the operation raises on zeros.
    """
    key = (func, tensors.key, torch.get_default_dtype())
    try:
        known = _known.get(key)  # once, as another thread may forget them
    except TypeError:  # an argument that has no hash
        return _try(func, tensors)
    if known is not None:
        return known
    found = _try(func, tensors)
    if len(_known) >= _MOST:
        _known.clear()
    _known[key] = found
    return found


def _try(func: Callable[..., Any], tensors: Tensors) -> Outcome:
    zeros = [_zeros_like(tensor) for tensor in tensors.all]
    args, kwargs = tensors.arguments(zeros)
    given = {id(tensor): index for index, tensor in enumerate(zeros)}

    def of(result: Any) -> Any:
        if isinstance(result, torch.Tensor):
            index = given.get(id(result))
            return geometry_of(result) if index is None else Given(index)
        if isinstance(result, (list, tuple)):
            return type(result)(of(each) for each in result)
        return result

    result = of(func(*args, **kwargs))
    changed = {
        index: geometry_of(zero)
        for index, (zero, tensor) in enumerate(zip(zeros, tensors.all))
        if zero.shape != tensor.shape
    }
    return Outcome(result, changed)


def geometry_of(tensor: torch.Tensor) -> Geometry:
    """The geometry of a tensor.

    Raises:
        NoSparseTensors: if it is sparse.
    """
    if tensor.layout is not torch.strided:
        raise NoSparseTensors(
            "asynchronous simulated devices have no sparse tensors: enter `simulate` without "
            "asynchronous=True"
        )
    return Geometry(tensor.shape, tensor.stride(), tensor.dtype)


def _zeros_like(tensor: torch.Tensor) -> torch.Tensor:
    zeros = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).zero_()
    if tensor.is_conj():
        zeros = zeros.conj()
    return zeros


def written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operation changes in place."""
    found: list[torch.Tensor] = []
    for index, name in _written_arguments(func):
        value = args[index] if index < len(args) else kwargs.get(name)
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(each, torch.Tensor):
                found.append(each)
    return found


@cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    return tuple(
        (index, argument.name)
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )

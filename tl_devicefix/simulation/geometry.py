"""The shapes, strides and dtypes of an operation's results, before it runs on its device.

An operation is run once on tensors that lie like its arguments, and the outcome is remembered: on
zeros on the CPU for devices behind the host, so that strides and errors are those of the CPU's
kernel, and on meta for tensors without values, for which torch's Python rules are slow.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch


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


class NotBehindTheHost(NotImplementedError):
    """Asynchronous devices do not have what an operation gives."""


def geometry_of(tensor: torch.Tensor) -> Geometry:
    """The geometry of a tensor.

    Raises:
        NotBehindTheHost: if it is sparse.
    """
    if tensor.layout is not torch.strided:
        raise NotBehindTheHost(
            "asynchronous simulated devices have no sparse tensors: enter `simulate` without "
            "asynchronous=True"
        )
    return Geometry(tensor.shape, tensor.stride(), tensor.dtype)


class Argument(NamedTuple):
    """A result that is one of the tensors given, by its number among them."""

    number: int


class Outcome(NamedTuple):
    """An operation's result, with a `Geometry` for each new tensor, and the tensors that it fills.

    These had no elements before, and are given a shape by the operation.
    """

    result: Any
    filled: dict[int, Geometry]


class Arguments:
    """An operation's arguments, and the tensors among them, each once, in order.

    Args:
        args: the arguments, with lists of tensors among them.
        kwargs: those given by name.
    """

    def __init__(self, args: Any, kwargs: dict[str, Any]) -> None:
        self.tensors: list[torch.Tensor] = []
        self._index: dict[int, int] = {}
        self._args, self._kwargs = args, kwargs
        self.key = (self._describe(args), self._describe(tuple(kwargs.items())))
        """What tells one call's geometry from another's."""

    def _describe(self, arg: Any) -> Any:
        if isinstance(arg, torch.Tensor):
            index = self._index.setdefault(id(arg), len(self.tensors))
            if index == len(self.tensors):
                self.tensors.append(arg)
            return index, arg.shape, arg.stride(), arg.dtype, arg.is_conj(), arg.is_neg()
        if isinstance(arg, (list, tuple)):
            return type(arg), tuple(self._describe(item) for item in arg)
        return type(arg), arg  # as 1 == 1.0 == True

    def with_tensors(self, tensors: list[torch.Tensor]) -> tuple[Any, dict[str, Any]]:
        """The arguments, with other tensors in the place of these."""

        def exchange(tensor: torch.Tensor) -> torch.Tensor:
            return tensors[self._index[id(tensor)]]

        kwargs = {name: exchanged(arg, exchange) for name, arg in self._kwargs.items()}
        return [exchanged(arg, exchange) for arg in self._args], kwargs

    def made(self, result: Any, make: Callable[[Geometry], torch.Tensor]) -> Any:
        """An outcome's result with new tensors, and the arguments that it returns."""
        if isinstance(result, Geometry):
            return make(result)
        if isinstance(result, Argument):
            return self.tensors[result.number]
        if isinstance(result, (list, tuple)):
            return type(result)(self.made(item, make) for item in result)
        return result


def exchanged(value: Any, exchange: Callable[[torch.Tensor], Any]) -> Any:
    """A value with something else in the place of each tensor in it."""
    if isinstance(value, torch.Tensor):
        return exchange(value)
    if type(value) in (list, tuple):
        return type(value)(exchanged(item, exchange) for item in value)
    return value


_outcomes: dict[Any, Outcome] = {}
"""By operation, place and arguments."""
_MOST = 10_000  # of several models; then they are forgotten


def _remember(key: Any, outcome: Outcome) -> None:
    if len(_outcomes) >= _MOST:
        _outcomes.clear()
    _outcomes[key] = outcome


def outcome(func: Callable[..., Any], arguments: Arguments) -> Outcome:
    """Tell what an operation gives on an asynchronous device.

    Raises:
        NotBehindTheHost: if it gives a sparse tensor, or makes one of its arguments larger.
        Exception: what the operation raises on zeros.
    """
    key = (func, "cpu", arguments.key, torch.get_default_dtype())
    try:
        found = _outcomes.get(key)  # once, as another thread may forget them
    except TypeError:  # an argument that has no hash
        return _outcome_on_zeros(func, arguments)
    if found is None:
        found = _outcome_on_zeros(func, arguments)
        _remember(key, found)
    return found


def _outcome_on_zeros(func: Callable[..., Any], arguments: Arguments) -> Outcome:
    zeros = [_zeros_like(tensor) for tensor in arguments.tensors]
    indices = {id(tensor): index for index, tensor in enumerate(zeros)}
    args, kwargs = arguments.with_tensors(zeros)

    def describe(result: torch.Tensor) -> Geometry | Argument:
        index = indices.get(id(result))
        return geometry_of(result) if index is None else Argument(index)

    result = exchanged(func(*args, **kwargs), describe)
    filled = {}
    for number, (zero, tensor) in enumerate(zip(zeros, arguments.tensors)):
        if zero.shape != tensor.shape:
            if tensor.numel():
                raise NotBehindTheHost(
                    f"asynchronous simulated devices do not resize tensors, but {func} would: give "
                    "it an empty one, or enter `simulate` without asynchronous=True"
                )
            filled[number] = geometry_of(zero)
    return Outcome(result, filled)


def _zeros_like(tensor: torch.Tensor) -> torch.Tensor:
    zeros = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).zero_()
    return zeros.conj() if tensor.is_conj() else zeros


def call_without_values(func: torch._ops.OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call an operation on meta tensors, or make what it gave when it was called so before."""
    if func._schema.is_mutable or func.is_view:  # these are fast, and their results are not new
        return func(*args, **kwargs)
    arguments = Arguments(args, kwargs)
    key = _key_on_meta(func, arguments)
    found = None if key is None else _outcomes.get(key)
    if found is not None:
        return arguments.made(
            found.result,
            lambda lies: torch.empty_strided(
                lies.shape, lies.stride, dtype=lies.dtype, device="meta"
            ),
        )
    result = func(*args, **kwargs)
    _remember_new(key, arguments, result)
    return result


def remember(func: torch._ops.OpOverload, args: Any, kwargs: dict[str, Any], result: Any) -> None:
    """Remember what an operation gave elsewhere, as torch's own rules refuse it."""
    if not func._schema.is_mutable:
        arguments = Arguments(args, kwargs)
        _remember_new(_key_on_meta(func, arguments), arguments, result)


def _key_on_meta(func: torch._ops.OpOverload, arguments: Arguments) -> Any:
    """A key of what an operation gives; None if other things than geometry may decide that."""
    key = (func, "meta", arguments.key, torch.get_default_dtype())
    try:
        hash(key)
    except TypeError:
        return None
    return key if all(tensor.is_meta for tensor in arguments.tensors) else None


def _remember_new(key: Any, arguments: Arguments, result: Any) -> None:
    """Remember strided tensors with memory of their own, all of which they use."""
    results = result if isinstance(result, (list, tuple)) else (result,)
    given = {tensor.untyped_storage()._cdata for tensor in arguments.tensors}

    def is_new(tensor: Any) -> bool:
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            return False
        storage, lazy = tensor.untyped_storage(), tensor.is_conj() or tensor.is_neg()
        return (
            not (tensor.storage_offset() or lazy or storage._cdata in given)
            and storage.nbytes() == geometry_of(tensor).nbytes
        )

    if key is not None and all(map(is_new, results)):
        _remember(key, Outcome(exchanged(result, geometry_of), {}))


def written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operation changes in place."""
    values = [
        args[index] if index < len(args) else kwargs.get(name)
        for index, name in _written_arguments(func)
    ]
    return tensors_in(values)


@cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    return tuple(
        (index, argument.name)
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in lists and tuples, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []

"""Executors of a machine's operations: the CPU, or one that computes shapes only."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

import numpy
import torch

from tl_devicefix.placement.devices import storage_of

aten = torch.ops.aten

Operation = torch._ops.OpOverload
Args = Sequence[Any]
Kwargs = dict[str, Any]
"""An operation's arguments: tensors, numbers, dtypes, and lists of them."""


class CpuExecutor:
    """Runs operations on the data of simulated tensors: on the CPU, at once, with CPU numerics.

    Devices are indices; None is the host.
    """

    data_device = torch.device("cpu")

    def run(self, func: Operation, args: Args, kwargs: Kwargs, device: int | None) -> Any:
        """Run an operation on a device, and return its result.

        The source of `copy_` and `_to_copy` may be on the host or on another device.
        """
        return func(*args, **kwargs)

    def read(self, tensor: torch.Tensor, device: int) -> torch.Tensor:
        """Return a device's tensor, ready for the host to read its values."""
        return tensor


class MetaExecutor(CpuExecutor):
    """Computes nothing: tensors have shapes, and no values.

    torch computes a shape in Python, in up to a millisecond. All blocks of a model run the same
    operations, so each new tensor's shape is computed once.
    """

    data_device = torch.device("meta")

    def __init__(self) -> None:
        # An operation and its arguments -> the size, strides and dtype of its result.
        self._known: dict[object, tuple[torch.Size, tuple[int, ...], torch.dtype]] = {}

    def run(self, func: Operation, args: Args, kwargs: Kwargs, device: int | None) -> Any:
        """Return a result of the right shape; the host reads zeros.

        A copy into a float tensor of the host leaves it as it was.
        """
        if func is aten.copy_.default and args[1].is_meta and device is None:
            # Zero integers, which may be indices. A new tensor that is not written takes no memory.
            return args[0] if args[0].is_floating_point() else args[0].zero_()
        key = _key(func, args, kwargs)
        if key in self._known:
            size, strides, dtype = self._known[key]
            result = torch.empty_strided(size, strides, dtype=dtype, device="meta")
        else:
            result = _result_of(func, args, kwargs)
            if key is not None and _is_new(result, args, kwargs):
                self._known[key] = result.size(), result.stride(), result.dtype
        return zeros_for(result) if device is None else result


def _result_of(func: Operation, args: Args, kwargs: Kwargs) -> Any:
    """Run an operation without values; if it needs them, say so."""
    try:
        return func(*args, **kwargs)
    except RuntimeError as error:  # torch raises its subclass NotImplementedError too
        # torch has no exception class for missing values, so match the message.
        if re.search(r"meta tensor|with Meta|register_meta", str(error)):
            raise NotImplementedError(
                f"the result of {func} depends on values, which a dry run does not have: "
                "change or skip that operation, or run it on real devices"
            ) from error
        raise


def _is_new(result: object, args: Args, kwargs: Kwargs) -> bool:
    """Return True for a dense tensor that is not in the memory of an argument."""
    if not isinstance(result, torch.Tensor) or result.layout is not torch.strided:
        return False
    given = dense_tensors([*args, *kwargs.values()])
    return storage_of(result) not in map(storage_of, given)


def _key(func: Operation, args: Args, kwargs: Kwargs) -> tuple[Hashable, ...] | None:
    """Return what decides the shape of a new result; None if values may, or if none is made."""
    if func.is_view or func._schema.is_mutable:
        return None
    # A mask on the host has values, which decide how much it selects.
    if not all(each.is_meta for each in dense_tensors([*args, *kwargs.values()])):
        return None
    return func, torch.get_default_dtype(), *_described([*args, *kwargs.items()])


def _described(values: Iterable[Any]) -> Iterator[Hashable]:
    """Yield what the shape of a result depends on, for each argument of an operation."""
    for value in values:
        if isinstance(value, torch.Tensor):
            strides = value.stride() if value.layout is torch.strided else None
            yield value.size(), strides, value.dtype, value.layout
        elif isinstance(value, (list, tuple)):
            yield tuple(_described(value))
        else:
            yield type(value), value


def zeros_for(meta: torch.Tensor) -> torch.Tensor:
    """Return zeros on the CPU for a meta tensor; until written to, they take no memory."""
    # Count by strides: expanded rows share memory, and sliced ones leave gaps.
    last = sum((size - 1) * stride for size, stride in zip(meta.shape, meta.stride()))
    n_bytes = (last + 1) * meta.itemsize if meta.numel() else 0
    blank = torch.from_numpy(numpy.zeros(n_bytes, numpy.uint8))
    return blank.view(meta.dtype).as_strided(meta.shape, meta.stride())


def dense_tensors(value: object) -> list[torch.Tensor]:
    """Return the dense tensors in lists and tuples; for a sparse tensor, its values and indices."""
    if isinstance(value, torch.Tensor):
        if value.layout is torch.sparse_coo:
            return [value._values(), value._indices()]
        return [value] if value.layout is torch.strided else []
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in dense_tensors(item)]
    return []

"""Executors of a machine's operations: the CPU, or one that computes shapes alone.

Without values, most of an operation's time goes into torch's Python code for the shape, strides and
dtype of the result. These depend on the arguments' only, and blocks are alike, so we cache them.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy
import torch

aten = torch.ops.aten

Operation = torch._ops.OpOverload
Args = Sequence[Any]
Kwargs = dict[str, Any]
"""An operation's arguments: tensors, numbers, dtypes, and lists of them."""


class Executor(Protocol):
    """Runs operations on the data of simulated tensors. Devices are indices; None is the host."""

    data_device: torch.device
    """The device of the data: the CPU, or meta."""

    def run(self, func: Operation, args: Args, kwargs: Kwargs, device: int | None) -> Any:
        """Run an operation on a device, and return its result.

        `copy_` and `_to_copy` may have a tensor of the host, or of another device, as source.
        """

    def read(self, tensor: torch.Tensor, device: int) -> torch.Tensor:
        """Return a tensor of a device, whose values the host is about to read."""


class CpuExecutor(Executor):
    """Runs operations on the CPU, at once."""

    data_device = torch.device("cpu")

    def run(self, func: Operation, args: Args, kwargs: Kwargs, device: int | None) -> Any:
        """Run an operation; a simulated device computes the CPU's numbers."""
        return func(*args, **kwargs)

    def read(self, tensor: torch.Tensor, device: int) -> torch.Tensor:
        """Return the tensor, because its values are there already."""
        return tensor


class MetaExecutor(CpuExecutor):
    """Computes nothing: tensors have shapes, and no values."""

    data_device = torch.device("meta")

    def run(self, func: Operation, args: Args, kwargs: Kwargs, device: int | None) -> Any:
        """Make a result of the right shape; values that the host reads are 0."""
        if func is aten.copy_.default and args[1].is_meta and device is None:
            # Zeros for integers, because they may be indices; others take no memory unwritten.
            return args[0] if args[0].is_floating_point() else args[0].zero_()
        try:
            result = call_without_values(func, args, kwargs)
        except RuntimeError as error:  # torch raises its subclass NotImplementedError too
            # Known by their words, because torch has no class for errors of missing values.
            if re.search(r"meta tensor|with Meta|register_meta", str(error)):
                raise NotImplementedError(
                    f"the result of {func} depends on values, which a dry run does not have: "
                    "change or skip that operation, or run it on real devices"
                ) from error
            raise
        return zeros_for(result) if device is None else result


def zeros_for(meta: torch.Tensor) -> torch.Tensor:
    """Zeros on the CPU, which take no memory until they are written to."""
    blank = torch.from_numpy(numpy.zeros(_extent(meta), numpy.uint8))
    return blank.view(meta.dtype).as_strided(meta.shape, meta.stride())


def _extent(tensor: torch.Tensor) -> int:
    """Return the bytes of a storage that just holds a tensor."""
    # Not numel() * itemsize, because expanded rows share memory and sliced ones leave gaps.
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return (last + 1) * tensor.itemsize if tensor.numel() else 0


class _Layout(NamedTuple):
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


_layouts: dict[Hashable, list[_Layout]] = {}
"""The layouts of results, by operation and arguments."""
_MOST_LAYOUTS = 10_000  # enough for several models; then the cache is cleared


def call_without_values(func: Operation, args: Args, kwargs: Kwargs) -> Any:
    """Call an operation on meta tensors, or repeat the result of an earlier, equal call."""
    if func._schema.is_mutable or func.is_view:  # views are fast, and their results are not new
        return func(*args, **kwargs)
    try:
        described = _described(args), _described(sorted(kwargs.items()))
    except _DecidesByValues:
        return func(*args, **kwargs)
    # The default dtype too, because a quotient of integers has it.
    key = func, *described, torch.get_default_dtype()
    # Looked up once, because another thread may clear the cache meanwhile.
    if (layouts := _layouts.get(key)) is not None:
        made = [
            torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            for shape, stride, dtype in layouts
        ]
        return made[0] if len(func._schema.returns) == 1 else tuple(made)
    result = func(*args, **kwargs)
    results = result if isinstance(result, tuple) else (result,)
    # A result that shares memory with an operand is not cached: a copy would not share it.
    operands = dense_tensors((*args, *kwargs.values()))
    used = {tensor.untyped_storage()._cdata for tensor in operands}
    if all(_is_new(tensor, used) for tensor in results):
        if len(_layouts) >= _MOST_LAYOUTS:
            _layouts.clear()
        _layouts[key] = [_Layout(made.shape, made.stride(), made.dtype) for made in results]
    return result


def _is_new(tensor: object, used: set[int]) -> bool:
    """Return True for a strided tensor that has memory of its own, and uses all of it."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        return False
    storage, lazy = tensor.untyped_storage(), tensor.is_conj() or tensor.is_neg()
    uses_all = not tensor.storage_offset() and storage.nbytes() == _extent(tensor)
    return uses_all and not lazy and storage._cdata not in used


_COMPARED = (int, float, bool, str, torch.dtype, torch.layout, torch.memory_format, torch.device)


class _DecidesByValues(Exception):
    """Raised for an argument whose values decide the layout of the result."""


def _described(value: object) -> Hashable:
    kind = type(value)
    if value is None or kind in _COMPARED:
        return kind, value  # with the type, because 1 == 1.0 == True
    # By exact types, because this runs for every operation of a dry run.
    if type(value) is torch.Tensor and value.is_meta:
        return value.size(), value.stride(), value.dtype
    if type(value) is list or type(value) is tuple:
        return tuple(map(_described, value))
    raise _DecidesByValues


def dense_tensors(value: object) -> list[torch.Tensor]:
    """Return the dense tensors in lists and tuples; a sparse one's values and indices."""
    if isinstance(value, torch.Tensor):
        if value.layout is torch.sparse_coo:
            return [value._values(), value._indices()]
        return [value] if value.layout is torch.strided else []
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in dense_tensors(item)]
    return []

"""Executors of a machine's operations: the CPU, or one that computes shapes alone.

Without values, most of an operation's time goes into torch's Python code for the shape, strides and
dtype of the result. These depend on the arguments' only, and blocks are alike, so we cache them.
"""

from __future__ import annotations

import re
from typing import Any

import numpy
import torch

aten = torch.ops.aten


class Executor:
    """Runs operations on the tensors behind the simulated ones: on the CPU, at once.

    Devices are indices, and None is the host. A machine takes another executor that has these two
    methods.
    """

    place = torch.device("cpu")
    """The device of the tensors behind: the CPU, or meta."""

    def run(self, func: Any, args: Any, kwargs: dict[str, Any], device: int | None) -> Any:
        """Run an operation on a device, and return its result.

        `copy_` and `_to_copy` may have a tensor of the host, or of another device, as source.
        """
        return func(*args, **kwargs)

    def read(self, tensor: torch.Tensor, device: int) -> torch.Tensor:
        """Return a tensor of a device, whose values the host is about to read."""
        return tensor


class MetaExecutor(Executor):
    """Computes nothing: tensors have shapes, and no values."""

    place = torch.device("meta")

    def run(self, func: Any, args: Any, kwargs: dict[str, Any], device: int | None) -> Any:
        """Make a result of the right shape; values that the host reads are 0."""
        if func is aten.copy_.default and args[1].is_meta and device is None:
            # Zeros for integers, because they may be indices; others take no memory unwritten.
            return args[0] if args[0].is_floating_point() else args[0].zero_()
        try:
            result = call_without_values(func, args, kwargs)
        except RuntimeError as error:  # NotImplementedError is one
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
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return (last + 1) * tensor.itemsize if tensor.numel() else 0


_results: dict[Any, list[tuple[torch.Size, tuple[int, ...], torch.dtype]]] = {}
"""Shapes, strides and dtypes, by operation and arguments."""
_MOST = 10_000  # enough for several models; then the cache is cleared


def call_without_values(func: torch._ops.OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call an operation on meta tensors, or repeat the result of an earlier, equal call."""
    if func._schema.is_mutable or func.is_view:  # views are fast, and their results are not new
        return func(*args, **kwargs)
    try:
        described = _described(args), _described(sorted(kwargs.items()))
    except _DecidesByValues:
        return func(*args, **kwargs)
    key = func, *described, torch.get_default_dtype()  # that of quotients of integers, say
    layouts = _results.get(key)  # because other threads may clear it meanwhile
    if layouts is not None:
        made = [
            torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            for shape, stride, dtype in layouts
        ]
        return made[0] if len(func._schema.returns) == 1 else tuple(made)
    result = func(*args, **kwargs)
    results = result if isinstance(result, tuple) else (result,)
    operands = tensors_in((args, list(kwargs.values())))
    used = {tensor.untyped_storage()._cdata for tensor in operands}
    if all(_is_new(tensor, used) for tensor in results):
        if len(_results) >= _MOST:
            _results.clear()
        _results[key] = [(result.shape, result.stride(), result.dtype) for result in results]
    return result


def _is_new(tensor: Any, used: set[int]) -> bool:
    """Return True if it is strided, with memory of its own, all of which it uses."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        return False
    storage, lazy = tensor.untyped_storage(), tensor.is_conj() or tensor.is_neg()
    uses_all = not tensor.storage_offset() and storage.nbytes() == _extent(tensor)
    return uses_all and not lazy and storage._cdata not in used


_PLAIN = (int, float, bool, str, torch.dtype, torch.layout, torch.memory_format, torch.device)


class _DecidesByValues(Exception):
    """Raised for an argument whose values decide the layout of the result."""


def _described(value: Any) -> Any:
    kind = type(value)
    if value is None or kind in _PLAIN:
        return kind, value  # with the type, because 1 == 1.0 == True
    if kind is torch.Tensor and value.is_meta:
        return value.size(), value.stride(), value.dtype
    if kind is list or kind is tuple:
        return tuple(map(_described, value))
    raise _DecidesByValues


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the dense tensors in lists and tuples; a sparse one's values and indices."""
    if isinstance(value, torch.Tensor):
        if value.layout is torch.sparse_coo:
            return [value._values(), value._indices()]
        return [value] if value.layout is torch.strided else []
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []

"""The shapes, strides and dtypes of tensors, and of an operation's results before it has run.

For tensors without values, most of an operation's time is torch's Python that finds out how the
result lies. That depends only on how the arguments lie, and the blocks of a model are alike: so
it is remembered.
"""

from __future__ import annotations

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

    def empty(self, device: torch.device | str) -> torch.Tensor:
        """A tensor that lies so, without values of its own."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)


def geometry_of(tensor: torch.Tensor) -> Geometry:
    """The geometry of a tensor.

    Raises:
        NotImplementedError: if it is sparse.
    """
    if tensor.layout is not torch.strided:
        raise NotImplementedError(
            f"a tensor of layout {tensor.layout} cannot be used here: call to_dense() first"
        )
    return Geometry(tensor.shape, tensor.stride(), tensor.dtype)


_results: dict[Any, list[Geometry]] = {}
"""By operation and arguments."""
_MOST = 10_000  # of several models; then they are forgotten


def call_without_values(func: torch._ops.OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call an operation on meta tensors, or repeat the result of an earlier, equal call."""
    if func._schema.is_mutable or func.is_view:  # these are fast, and their results are not new
        return func(*args, **kwargs)
    key = _key(func, args, kwargs)
    geometries = _results.get(key)  # other threads may clear it meanwhile
    if geometries is not None:
        made = [geometry.empty("meta") for geometry in geometries]
        return made[0] if len(func._schema.returns) == 1 else tuple(made)
    result = func(*args, **kwargs)
    results = result if isinstance(result, tuple) else (result,)
    operands = tensors_in((args, list(kwargs.values())))
    used = {tensor.untyped_storage()._cdata for tensor in operands}
    if key is not None and all(_is_new(tensor, used) for tensor in results):
        if len(_results) >= _MOST:
            _results.clear()
        _results[key] = [geometry_of(tensor) for tensor in results]
    return result


def _is_new(tensor: Any, used: set[int]) -> bool:
    """Whether it is strided, with memory of its own, all of which it uses."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        return False
    storage, lazy = tensor.untyped_storage(), tensor.is_conj() or tensor.is_neg()
    return (
        not (tensor.storage_offset() or lazy or storage._cdata in used)
        and storage.nbytes() == geometry_of(tensor).nbytes
    )


_PLAIN = (int, float, bool, str, torch.dtype, torch.layout, torch.memory_format, torch.device)


def _key(func: torch._ops.OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
    """A key for the results' geometries; None if an argument decides by its values."""
    try:
        return func, _described(args), _described(sorted(kwargs.items()))
    except _DecidesByValues:
        return None


class _DecidesByValues(Exception):
    """An argument that does not tell how the results lie."""


def _described(value: Any) -> Any:
    kind = type(value)
    if value is None or kind in _PLAIN:
        return kind, value  # as 1 == 1.0 == True
    if kind is torch.Tensor and value.is_meta:
        return value.size(), value.stride(), value.dtype
    if kind is list or kind is tuple:
        return tuple(map(_described, value))
    raise _DecidesByValues


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


def is_view(func: Any) -> bool:
    """Whether an operation gives other views of memory, and computes nothing."""
    return (
        func.is_view
        or func is torch.ops.aten._unsafe_view.default
        or torch.Tag.inplace_view in func.tags
    )


def depends_on_values(func: Any, args: Any) -> bool:
    """Whether an operation's result is a number, or its shape depends on values."""
    if func is torch.ops.aten.index.Tensor:  # numbers give a shape without being known
        return any(index.dtype in (torch.bool, torch.uint8) for index in tensors_in(args[1]))
    return func is torch.ops.aten._linalg_check_errors.default or bool(_UNKNOWN & set(func.tags))


_UNKNOWN = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The dense tensors in lists and tuples: of a sparse one, its values and its indices."""
    if isinstance(value, torch.Tensor):
        if value.layout is torch.sparse_coo:
            return [value._values(), value._indices()]
        return [value] if value.layout is torch.strided else []
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []

"""What ranks send each other beside values, and torch's settings that hold on all of them.

A command is the name of one of the worker's methods, and its arguments: see `rpc_worker`. A tensor
of another rank is a storage, which has a number, and how it lies in it: views need no command.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.backends import opt_einsum

from tl_devicefix.simulation.geometry import Geometry

Operation = Any
"""An operation of torch, `torch._ops.OpOverload`."""


class RemoteTensor(NamedTuple):
    """A tensor of a rank: how it lies in one of its storages."""

    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


class NewStorage(NamedTuple):
    """A tensor that an operation makes: the number of its storage, and how it lies in it."""

    number: int
    geometry: Geometry


class ValuesFollow(NamedTuple):
    """An answer: values, which come next."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Failure(NamedTuple):
    """The answer of a rank on which something failed.

    Attributes:
        kind: name of the error's class.
        message: of the error.
        is_consequence: whether it only follows from another failure, here or on another rank.
    """

    kind: str
    message: str
    is_consequence: bool = False


def exchanged(values: Any, exchange: Callable[[torch.Tensor], Any]) -> Any:
    """Arguments with other things in the place of tensors."""
    if isinstance(values, torch.Tensor):
        return exchange(values)
    if type(values) in (list, tuple) or isinstance(values, list):
        return [exchanged(value, exchange) for value in values]
    if type(values) is dict:
        return {name: exchanged(value, exchange) for name, value in values.items()}
    return values


@functools.cache
def operation_named(name: str) -> Operation:
    """An operation by its full name, as "aten::add.Tensor"."""
    namespace, _, name = name.partition("::")
    name, _, overload = name.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")


_C: Any = torch._C
_GET_AND_SET = (
    *("cublas_allow_bf16_reduced_precision_reduction", "cublas_allow_fp16_accumulation"),
    *("cublas_allow_fp16_reduced_precision_reduction", "math_sdp_allow_fp16_bf16_reduction"),
    *("cpu_allow_fp16_reduced_precision_reduction", "deterministic_fill_uninitialized_memory"),
    *("cudnn_benchmark", "cudnn_deterministic", "cudnn_enabled", "mkldnn_deterministic"),
    *("mkldnn_enabled", "nnpack_enabled", "sdp_priority_order"),
    *("blas_preferred_backend", "linalg_preferred_backend"),
)
_ATTENTION = ("cudnn", "flash", "math", "mem_efficient")
# What float32 is computed with, which `torch.set_float32_matmul_precision` sets too.
_PRECISIONS = [(of, what) for of in ("cuda", "mkldnn") for what in ("matmul", "conv", "rnn")]

_SMALLEST = 2.2250738585072014e-308


def _flushes_denormals() -> bool:
    """In this thread, whose floats are Python's too."""
    return _SMALLEST / 2 == 0.0


def _set_einsum(is_enabled: bool) -> None:
    if opt_einsum.is_available():
        opt_einsum.enabled = is_enabled


_SETTINGS: list[tuple[Callable[[], Any], Callable[..., Any]]] = [
    (torch.get_default_dtype, torch.set_default_dtype),
    (_flushes_denormals, torch.set_flush_denormal),
    (opt_einsum._get_enabled, _set_einsum),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    *(
        (partial(_C._get_fp32_precision_getter, *of), partial(_C._set_fp32_precision_setter, *of))
        for of in _PRECISIONS
    ),
    *(
        (getattr(_C, f"_get_{name}"), getattr(_C, f"_set_{name}"))
        for name in _GET_AND_SET
        if hasattr(_C, f"_get_{name}")  # each torch has some more
    ),
    *(
        (getattr(_C, f"_get_{name}_sdp_enabled"), getattr(_C, f"_set_sdp_use_{name}"))
        for name in _ATTENTION
    ),
]


def settings() -> list[Any]:
    """Those of torch that change what operations give, as they are set now, in this thread."""
    return [get() for get, _ in _SETTINGS]


def set_as(values: list[Any]) -> None:
    """Set them as they are on rank 0."""
    for (get, put), value in zip(_SETTINGS, values, strict=True):
        if get() != value:
            put(*value) if type(value) is tuple else put(value)

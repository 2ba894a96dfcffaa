"""Settings of torch that change what operations give: every rank has those of rank 0."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.backends import opt_einsum

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
    """How they are set now, in this thread."""
    return [get() for get, _ in _SETTINGS]


def set_as(there: list[Any]) -> None:
    """Set them as they are on rank 0."""
    for (get, put), value in zip(_SETTINGS, there, strict=True):
        if get() != value:
            put(*value) if type(value) is tuple else put(value)

"""The dtype that weights are asked for in, which may be given by its name."""

from __future__ import annotations

from typing import Any

import torch

_SHORT = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_NAMES = sorted([*_SHORT, "float32", "float16", "bfloat16"])


def torch_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """A dtype, or its name as HookedTransformer takes it ("bfloat16", "bf16", "torch.bfloat16").

    Raises:
        ValueError: if there is no such dtype.
    """
    named: Any = dtype
    if isinstance(dtype, str):
        named = _SHORT.get(dtype, getattr(torch, dtype.removeprefix("torch."), None))
    if not isinstance(named, torch.dtype) or not named.is_floating_point:
        raise ValueError(
            f"dtype={dtype!r} is no floating-point dtype: give one of {', '.join(_NAMES)}, or a "
            "torch.dtype"
        )
    return named

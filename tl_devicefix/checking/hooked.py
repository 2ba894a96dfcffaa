"""What is asked of a HookedTransformer otherwise than of a TransformerBridge."""

from __future__ import annotations

from typing import Any

import torch

from tl_devicefix.checking.norms import norm_findings
from tl_devicefix.checking.repairing import put_right
from tl_devicefix.checking.setups import setup_findings

__all__ = [
    "are_tied",
    "bytes_held",
    "count_parameters",
    "norm_findings",
    "put_right",
    "setup_findings",
]


def are_tied(model: Any, one: str, other: str) -> bool:
    """Whether two parameters may share memory: in TransformerLens each has its own."""
    return False


def count_parameters(model: Any) -> int:
    """How many numbers the parameters are."""
    return sum(parameter.numel() for parameter in model.parameters())


def bytes_held(model: Any) -> dict[torch.device, int]:
    """Bytes of parameters and buffers on each device."""
    held: dict[torch.device, int] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        nbytes = 0 if tensor.is_meta else tensor.nbytes
        held[tensor.device] = held.get(tensor.device, 0) + nbytes
    return held

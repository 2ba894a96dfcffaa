"""Bridges over simulated devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bridges import boot, references  # noqa: F401


@pytest.fixture
def fused_blocks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many queries each call of SDPA had, of blocks that run transformers' own layer."""
    calls: list[int] = []
    original = torch.nn.functional.scaled_dot_product_attention

    def counting(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(q.shape[2])
        return original(q, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counting)
    return calls

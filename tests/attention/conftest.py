"""Models over the devices of a machine that is open for a whole module, and how they attend."""

from __future__ import annotations

import pytest
import torch.nn.functional as F
from spread_of_either_class import *  # noqa: F403


@pytest.fixture
def fused_blocks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many queries each call of SDPA had, of blocks that build no scores."""
    calls: list[int] = []
    original = F.scaled_dot_product_attention

    def counting(q, *args, **kwargs):  # type: ignore[no-untyped-def]
        calls.append(q.shape[2])
        return original(q, *args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counting)
    return calls

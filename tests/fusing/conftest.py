"""Models whose blocks are fused, on the CPU, and a list of their calls of SDPA."""

from __future__ import annotations

import copy

import pytest
import torch.nn.functional as F
from attending import FUSING

import tl_devicefix


@pytest.fixture(params=FUSING)
def model_class(request):
    """The classes of models that can be fused."""
    return request.param


@pytest.fixture
def fused(shared):
    """`fused("llama")`: a model on the CPU, with fused blocks, that the test may change."""

    def fused(kind="llama", **options):
        model = copy.deepcopy(shared(kind, device="cpu", **options))
        tl_devicefix.fuse_blocks(model)
        return model

    return fused


@pytest.fixture
def fused_blocks(monkeypatch):
    """The number of queries in each call of SDPA, which only fused blocks make."""
    calls: list[int] = []
    original = F.scaled_dot_product_attention

    def counting(q, *args, **kwargs):  # type: ignore[no-untyped-def]
        calls.append(q.shape[2])
        return original(q, *args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counting)
    return calls

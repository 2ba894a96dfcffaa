"""Models whose blocks are fused, on the CPU, and a list of their calls of SDPA."""

from __future__ import annotations

import copy

import pytest
import torch.nn.functional as F
from model_classes import BRIDGE, CLASSES, HOOKED
from packaging.version import Version

import tl_devicefix
from tl_devicefix.monkeypatch.versions import installed

OLDEST = {HOOKED: "3.8", BRIDGE: "4.0"}
FUSING = [model_class for model_class in CLASSES if installed() >= Version(OLDEST[model_class])]


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
    calls, original = [], F.scaled_dot_product_attention

    def counting(q, *args, **kwargs):
        calls.append(q.shape[2])
        return original(q, *args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counting)
    return calls

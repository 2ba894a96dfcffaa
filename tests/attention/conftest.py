"""Models over the devices of a machine that is open for a whole module, and how they attend."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch.nn.functional as F
from spread_of_either_class import *  # noqa: F403

import tl_devicefix
from tl_devicefix.monkeypatch.versions import has_hooked_transformer


@pytest.fixture
def fused_blocks(monkeypatch):
    """How many queries each call of SDPA had, of blocks that build no scores."""
    calls: list[int] = []
    original = F.scaled_dot_product_attention

    def counting(q, *args, **kwargs):  # type: ignore[no-untyped-def]
        calls.append(q.shape[2])
        return original(q, *args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counting)
    return calls


@pytest.fixture
def on_one_cpu(request):
    """`on_one_cpu("llama")`: a HookedTransformer, or of TransformerLens 4 a Bridge."""
    return request.getfixturevalue("on_cpu" if has_hooked_transformer() else "bridge_references")


@pytest.fixture
def sdpa(on_one_cpu):
    """`sdpa("llama")`: a model on the CPU that attends so, for as long as a test takes."""
    with ExitStack() as chosen:

        def get(name, **options):
            model = on_one_cpu(name, **options)
            chosen.enter_context(tl_devicefix.set_attn_implementation(model, "sdpa"))
            return model

        yield get

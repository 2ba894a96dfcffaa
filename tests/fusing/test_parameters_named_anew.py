"""A fused block follows parameters that are deleted, or that others take the place of."""

from __future__ import annotations

import pytest
import torch
from attending import assert_either_way
from packaging.version import Version
from torch.nn.utils import prune

from tl_devicefix.monkeypatch.versions import installed

pytestmark = [
    pytest.mark.hooked,
    pytest.mark.skipif(
        installed() < Version("3.8"), reason="fuse_blocks needs TransformerLens 3.8"
    ),
]


def delete_norm_of_queries(model):
    norm = model.blocks[1].attn.q_norm
    doubled = norm.w.data * 2
    del norm.w
    norm.w = doubled


CHANGES = {
    "prune a weight": (
        "gpt2",
        lambda model: prune.random_unstructured(model.blocks[1].mlp, "b_in", 0.5),
    ),
    "delete a norm's weight": ("qwen3", delete_norm_of_queries),
    "no bias": ("llama", lambda model: setattr(model.blocks[1].mlp, "b_out", None)),
}


@torch.no_grad()
@pytest.mark.parametrize("change", CHANGES)
def test_next_forward_sees_a_deleted_or_replaced_parameter(change, fused, tokens):
    name, act = CHANGES[change]
    model = fused(name)
    model(tokens)
    act(model)
    assert_either_way(model, lambda model: model(tokens))


@torch.no_grad()
def test_fused_blocks_run_an_empty_batch(fused, tokens):
    assert_either_way(fused("llama"), lambda model: model(tokens[:0]))


def test_alibi_made_in_inference_mode_is_used_with_gradients(fused, tokens):
    model = fused("bloom")
    with torch.inference_mode():
        model(tokens)
    assert_either_way(model, lambda model: model(tokens[:, :1]))

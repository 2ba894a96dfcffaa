"""nnsight's `.source` shows the operations of TransformerLens's own forwards: `nox -s nnsight`."""

import copy

import pytest
import torch
from comparison import assert_agrees

import tl_devicefix

pytest.importorskip("nnsight", reason="nnsight is not installed: run `nox -s nnsight`")

from nnsight import NNsight

# "" is the model itself.
MODULES = ["", "blocks.3", "blocks.3.attn", "blocks.3.mlp", "blocks.3.ln1", "ln_final"]


@pytest.mark.parametrize("path", MODULES)
@pytest.mark.parametrize("where", ["on_one", "load"])
def test_source_lists_the_operations_of_the_unpatched_forward(
    model_class, where, path, machine, request
):
    def operations():
        traced = NNsight(copy.deepcopy(model))
        return (traced.get(path) if path else traced).source.names

    model = request.getfixturevalue(where)("llama")
    with tl_devicefix.disabled():
        expected = operations()
    assert operations() == expected


@pytest.mark.hooked  # a TransformerBridge's attention runs operations of transformers
@pytest.mark.parametrize("where", ["on_one", "load"])
def test_operation_in_source_can_be_read_and_changed(where, machine, request, tokens):
    model = copy.deepcopy(request.getfixturevalue(where)("llama"))
    tokens = tokens.to(model.cfg.device)
    logits, cache = model.run_with_cache(tokens)
    traced = NNsight(model)
    block = traced.blocks[3].source  # before the block runs

    with traced.trace(tokens):
        pattern = traced.blocks[3].attn.source.self_hook_pattern_0.output.save()
        block.self_hook_resid_post_0.output[:] = 0
        changed = traced.output.save()

    assert_agrees(pattern, cache["pattern", 3])
    hooks = [("blocks.3.hook_resid_post", lambda x, hook: torch.zeros_like(x))]
    assert_agrees(changed, model.run_with_hooks(tokens, fwd_hooks=hooks))
    assert not torch.equal(changed.cpu(), logits.cpu())

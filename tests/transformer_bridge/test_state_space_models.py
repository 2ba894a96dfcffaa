"""State space models and hybrids over several devices, which TransformerLens refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparison import assert_agrees
from runs_of_users import GREEDY

from tl_devicefix.monkeypatch.versions import has_hooked_transformer

pytestmark = pytest.mark.bridge

NAMES = ["mamba", "mamba-2", "bamba", "olmo-hybrid"]  # test_parity has the others' logits
if has_hooked_transformer():  # TransformerLens 3.9, where it is the same code
    NAMES = ["mamba", "bamba"]
OPTIONS = {**GREEDY, "max_new_tokens": 6}


def results(bridge: Any, tokens: torch.Tensor) -> list[Any]:
    """What a Bridge gives: with hooks, cached, in gradients, and generating."""

    def edit(residual: torch.Tensor, hook: Any) -> torch.Tensor:
        return residual * 1.5 + 1

    with bridge.hooks(fwd_hooks=[("blocks.3.hook_in", edit)]):
        logits, cache = bridge.run_with_cache(tokens)
    loss = bridge(tokens, return_type="loss")
    weights = [weight for weight in bridge.parameters() if weight.requires_grad]
    gradients = torch.autograd.grad(loss, weights, allow_unused=True)
    # With transformers 5.23, OLMo-Hybrid's cache is not where TransformerLens looks for it.
    is_cached = "OlmoHybrid" not in bridge.cfg.architecture
    generated = bridge.generate(tokens, **OPTIONS, use_past_kv_cache=is_cached)
    return [logits, dict(cache.items()), gradients, generated]


@pytest.mark.fails_unpatched
@pytest.mark.parametrize("name", NAMES)
def test_spread_state_space_model_gives_what_one_device_gives(name, load, on_one, machine, tokens):
    assert_agrees(results(load(name, n_devices=4), tokens), results(on_one(name), tokens))


def test_generation_with_a_cached_state_equals_without(load, tokens):
    """transformers 5.24 takes it by another name than a Bridge of TransformerLens 4.3 gives."""
    bridge = load("mamba", device="cpu")
    expected = bridge.generate(tokens, **OPTIONS, use_past_kv_cache=False)
    assert_agrees(bridge.generate(tokens, **OPTIONS, use_past_kv_cache=True), expected)

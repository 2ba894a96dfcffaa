"""`plan` and `estimate`, also from the command line, of a Bridge: nothing is loaded or fetched.

What is the same for HookedTransformer is tested in tests/planning and tests/placement.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tl_devicefix import estimate, plan
from tl_devicefix.checkpoints.configs import known_config
from tl_devicefix.monkeypatch.versions import has_hooked_transformer

GIB = 2**30
BILLIONS = {
    "meta-llama/Llama-2-70b-hf": 68.98, "meta-llama/Llama-3.2-1B": 1.236,
    "mistralai/Mistral-7B-v0.1": 7.242, "mistralai/Mixtral-8x7B-v0.1": 46.70,
    "Qwen/Qwen2.5-72B": 72.71, "google/gemma-7b": 8.538, "google/gemma-2-9b": 9.242,
    "EleutherAI/pythia-12b": 11.85, "gpt2": 0.124,
}  # fmt: skip
"""The published numbers of parameters, a tied embedding counted once."""


@pytest.mark.parametrize("name", BILLIONS)
def test_a_plan_weighs_the_published_number_of_parameters(name: str, machine: Any) -> None:
    config = known_config(name)
    placement = plan(config, n_devices=4, dtype=torch.bfloat16)

    count = sum(component.weights for component in placement.components) / 2
    if config.tie_word_embeddings:
        count -= config.vocab_size * config.hidden_size
    assert count == pytest.approx(1e9 * BILLIONS[name], rel=0.01)
    assert len(placement.devices) == 4


@pytest.mark.skipif(has_hooked_transformer(), reason="a name is HookedTransformer's before 4.0")
def test_a_name_plans_as_its_config(machine: Any) -> None:
    name = "meta-llama/Llama-2-70b-hf"
    assert plan(name, n_devices=4, dtype=torch.bfloat16) == plan(
        known_config(name), n_devices=4, dtype="bfloat16"
    )


# --------------------------------------------------------------------------------------------
# Estimates


def test_the_kv_cache_is_that_of_all_tokens() -> None:
    result = estimate(known_config("Qwen/Qwen2-0.5B"), batch_size=2, seq_len=100, max_new_tokens=29)
    tokens, width, layers = 128, 2 * 64, 24
    assert result.devices[0].kv_cache == pytest.approx(
        2 * 2 * tokens * width * 4 * layers, rel=0.01
    )


def test_attention_in_a_window_caches_the_window() -> None:
    result = estimate(
        known_config("google/gemma-2-2b"), dtype="bfloat16", seq_len=6000, max_new_tokens=100
    )
    local, everywhere = 13 * 4095, 13 * 6099  # tokens
    assert result.devices[0].kv_cache == pytest.approx(
        2 * (local + everywhere) * 4 * 256 * 2, rel=0.01
    )

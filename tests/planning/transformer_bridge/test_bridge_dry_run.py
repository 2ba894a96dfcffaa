"""`dry_run` of a Bridge: what is its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dry_run_jobs import fold, forward
from transformer_lens.model_bridge import TransformerBridge

from tl_devicefix.planning.dry_run import dry_run


def test_compatibility_mode_takes_little_more_than_the_weights() -> None:
    options: Any = {"dtype": torch.bfloat16, "hf_config_overrides": {"num_hidden_layers": 4}}
    dry = dry_run("EleutherAI/pythia-1.4b", fold, 2, cls=TransformerBridge, **options)

    assert dry.runs, dry
    largest = max(component.weights for component in dry.placement.components)
    for peak, held in zip(dry.peaks, dry.weights):
        assert peak.bytes - held < 4 * largest  # in float32, twice


def test_the_config_s_fields_may_be_others_as_for_booting() -> None:
    def look(bridge: Any) -> Any:
        return bridge.cfg.n_ctx, bridge.cfg.n_layers

    options: Any = {"n_ctx": 64, "hf_config_overrides": {"num_hidden_layers": 2}}
    dry = dry_run("EleutherAI/pythia-70m", look, cls=TransformerBridge, **options)

    assert dry.result == (64, 2)


def test_a_local_checkpoint_brings_its_tokenizer(checkpoints: Any) -> None:
    dry = dry_run(
        str(checkpoints("llama")), lambda bridge: bridge("a b").shape[0], cls=TransformerBridge
    )
    assert dry.result == 1, dry


def test_what_is_no_class_or_option_of_it_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cls must be .*TransformerBridge, but is"):
        dry_run("gpt2", forward, cls=dict)
    with pytest.raises(TypeError, match="no argument 'fold_ln' for a TransformerBridge"):
        dry_run("gpt2", forward, cls=TransformerBridge, fold_ln=True)

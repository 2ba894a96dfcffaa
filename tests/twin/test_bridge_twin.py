"""A Bridge tells if it would not give transformers' numbers, hooked or in compatibility mode."""

from __future__ import annotations

import warnings

import pytest
import torch
from hf_models import HF_CONFIGS, make_hf_model
from model_classes import TransformerBridge

import tl_devicefix

pytestmark = pytest.mark.bridge

OTHER_NUMBERS = "gives other numbers than transformers"


def test_mismatch_is_warned_of_or_refused(save, tokens):
    path, _ = save("gpt2", scale_attn_weights=False)
    with pytest.warns(UserWarning, match=OTHER_NUMBERS):
        bridge = TransformerBridge.boot_transformers(path)
    assert OTHER_NUMBERS in str(tl_devicefix.check(bridge))
    before = bridge(tokens)
    with pytest.raises(ValueError, match=f"in compatibility mode {OTHER_NUMBERS}"):
        bridge.enable_compatibility_mode(on_mismatch="refuse")
    assert bridge(tokens).equal(before)


def test_boot_of_a_right_model_says_nothing(checkpoints):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        bridge = TransformerBridge.boot_transformers(str(checkpoints("llama")))
        bridge.enable_compatibility_mode()
    assert tl_devicefix.check(bridge)


def test_replaced_part_of_hf_model_is_warned_of_and_not_folded(checkpoints, tokens):
    hf_model = make_hf_model(HF_CONFIGS["llama"]())
    hf_model.model.layers[1].mlp.act_fn = torch.nn.ReLU()
    path = str(checkpoints("llama"))
    with pytest.warns(UserWarning, match=r"does not describe .*model\.layers\.\*\.mlp\.act_fn"):
        bridge = TransformerBridge.boot_transformers(path, hf_model=hf_model)
    before = bridge(tokens)
    with pytest.raises(ValueError, match=r"would leave out parts of hf_model .*act_fn"):
        bridge.enable_compatibility_mode()
    assert bridge(tokens).equal(before)

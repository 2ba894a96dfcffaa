"""A Bridge tells if it would not give transformers' numbers, hooked or in compatibility mode."""

import json
import re
import warnings

import pytest
import torch
import transformers
from hf_models import GROUPED, HF_CONFIGS, make_hf_model
from model_classes import TransformerBridge

import tl_devicefix
from tl_devicefix.twin import Twin, undisturbed

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
    bridge.enable_compatibility_mode(on_mismatch="ignore")
    assert OTHER_NUMBERS in str(tl_devicefix.check(bridge))  # what boot found


def test_boot_of_a_right_model_says_nothing(checkpoints):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        bridge = TransformerBridge.boot_transformers(str(checkpoints("llama")))
        bridge.enable_compatibility_mode()
    assert tl_devicefix.check(bridge)


@pytest.mark.parametrize(("on_mismatch", "times"), [("warn", 1), ("ignore", 0)])
def test_replaced_part_of_hf_model_is_told_once_and_not_folded(
    on_mismatch, times, checkpoints, tokens
):
    hf_model = make_hf_model(HF_CONFIGS["llama"]())
    hf_model.model.layers[1].mlp.act_fn = torch.nn.ReLU()
    options = {"hf_model": hf_model, "on_mismatch": on_mismatch}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", UserWarning)
        bridge = TransformerBridge.boot_transformers(str(checkpoints("llama")), **options)
    says = r"does not describe .*model\.layers\.\*\.mlp\.act_fn"
    assert [bool(re.search(says, str(each.message))) for each in told] == [True] * times
    before = bridge(tokens)
    with pytest.raises(ValueError, match=r"would leave out parts of hf_model .*act_fn"):
        bridge.enable_compatibility_mode()
    assert bridge(tokens).equal(before)


def test_finding_stays_while_weights_are_folded(checkpoints, monkeypatch):
    bridge = TransformerBridge.boot_transformers(str(checkpoints("llama")))
    checked = "tl_devicefix.transformer_bridge.processing.check_bridge_numbers"
    with monkeypatch.context() as faulty:
        faulty.setattr(checked, lambda *_: OTHER_NUMBERS)
        bridge.enable_compatibility_mode()
    for again in ({}, {"no_processing": True}, {"on_mismatch": "ignore"}):
        bridge.enable_compatibility_mode(**again)
        assert OTHER_NUMBERS in str(tl_devicefix.check(bridge))


@pytest.mark.parametrize("kind", ["DeepseekV3Config", "Glm4MoeConfig"])
def test_twin_has_a_layer_of_experts_after_a_dense_one(kind):
    with undisturbed():
        twin = Twin.of(getattr(transformers, kind)(first_k_dense_replace=3), 8)
    dense, sparse = (layer.mlp for layer in twin.hf_model.model.layers)
    assert not hasattr(dense, "experts")
    assert len(sparse.gate.weight) == (32 if kind == "DeepseekV3Config" else 10)


def test_no_check_asks_whether_to_trust_code(tmp_path, monkeypatch):
    class OwnConfig(transformers.LlamaConfig):
        model_type = "own"

    code = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    config = OwnConfig(**GROUPED, auto_map=code)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    asked = []
    monkeypatch.setattr("builtins.input", lambda prompt: asked.append(prompt) or "n")
    for check in (
        lambda: TransformerBridge.boot_transformers(str(tmp_path)),
        lambda: Twin.of(config, 8),
    ):
        with pytest.raises(ValueError, match="trust_remote_code"):
            check()
    assert not asked

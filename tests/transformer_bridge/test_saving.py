"""What a Bridge has learned, in transformers and on other devices."""

import pytest
import torch
from comparison import assert_agrees
from safetensors.torch import load_model, save_model
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.bridge


def test_trained_weights_load_in_transformers_and_elsewhere(load, checkpoints, tokens, tmp_path):
    bridge = load("llama", n_devices=4).requires_grad_()
    bridge(tokens, return_type="loss").backward()
    torch.optim.SGD(bridge.parameters(), lr=0.5).step()
    logits = bridge(tokens).detach().cpu()

    weights = bridge.original_model.state_dict()
    weights = {name.replace("._original_component", ""): w.cpu() for name, w in weights.items()}
    hf_model = AutoModelForCausalLM.from_pretrained(checkpoints("llama"))
    assert not torch.allclose(hf_model(tokens).logits, logits)
    assert not hf_model.load_state_dict(weights, strict=False).missing_keys
    hf_model.save_pretrained(tmp_path)
    assert_agrees(AutoModelForCausalLM.from_pretrained(tmp_path)(tokens).logits, logits)

    save_model(bridge, str(tmp_path / "of_the_bridge"))
    other = load("llama", device="cpu")
    load_model(other, str(tmp_path / "of_the_bridge"))
    assert_agrees(other(tokens), logits)

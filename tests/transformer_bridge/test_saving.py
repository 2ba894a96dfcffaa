"""What a Bridge has learned, in transformers and on other devices."""

import pytest
import torch
from comparison import assert_agrees
from safetensors.torch import load_model, save_model
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.bridge


@pytest.fixture
def trained(load, tokens):
    """A Bridge over four devices after a step, and its logits."""
    bridge = load("llama", n_devices=4).requires_grad_()
    bridge(tokens, return_type="loss").backward()
    torch.optim.SGD(bridge.parameters(), lr=0.5).step()
    return bridge, bridge(tokens).detach().cpu()


def test_trained_weights_load_in_transformers(trained, checkpoints, tokens, tmp_path):
    bridge, logits = trained
    weights = bridge.original_model.state_dict()
    weights = {name.replace("._original_component", ""): w.cpu() for name, w in weights.items()}
    hf_model = AutoModelForCausalLM.from_pretrained(checkpoints("llama"))
    assert not torch.allclose(hf_model(tokens).logits, logits)
    assert not hf_model.load_state_dict(weights, strict=False).missing_keys
    hf_model.save_pretrained(tmp_path)
    assert_agrees(AutoModelForCausalLM.from_pretrained(tmp_path)(tokens).logits, logits)


def test_trained_weights_load_on_another_device(trained, load, tokens, tmp_path):
    bridge, logits = trained
    save_model(bridge, str(tmp_path / "model.safetensors"))
    other = load("llama", device="cpu")
    load_model(other, str(tmp_path / "model.safetensors"))
    assert_agrees(other(tokens), logits)

"""Every architecture runs transformers' own layer with the Bridge's results, or says why not.

Over two devices, it gives them too.
"""

from __future__ import annotations

from pathlib import Path

import catalogue
import pytest
import torch
from comparison import assert_agrees
from hf_models import make_tokenizer
from transformer_lens.model_bridge import TransformerBridge

import tl_devicefix
from tl_devicefix.monkeypatch.versions import has_hooked_transformer
from tl_devicefix.transformer_bridge.block import why_installed

pytestmark = [
    pytest.mark.full("a hundred and fifty models; by default, tests of plain layers run six"),
    pytest.mark.skipif(has_hooked_transformer(), reason="a Bridge of TransformerLens 4"),
    pytest.mark.filterwarnings("ignore"),
]
AS_INSTALLED = {
    ("BitNetForCausalLM", True): "leaves out a norm",
    ("FalconForCausalLM", False): "with a forward of its own",
    ("FalconForCausalLM", True): "with a forward of its own",
}
NOT_COMPATIBLE = ("FalconH1ForCausalLM", "PhiForCausalLM", "VaultGemmaForCausalLM")
"""What TransformerLens does not process in these sizes, or at all."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    return make_tokenizer(directory)


@torch.no_grad()
@pytest.mark.parametrize("compatible", [False, True])
@pytest.mark.parametrize("name", catalogue.names())
def test_an_architecture(name, compatible, tokenizer, tmp_path):
    if compatible and name in NOT_COMPATIBLE:
        pytest.skip("TransformerLens does not process it")
    model, tokens = catalogue.make(name), torch.tensor([[3, 4, 5, 6, 7, 8, 9, 10]] * 2)
    model.save_pretrained(tmp_path)
    model = type(model).from_pretrained(tmp_path, attn_implementation="eager")
    with tl_devicefix.disabled():
        bridge = TransformerBridge.boot_transformers(
            name, hf_model=model, tokenizer=tokenizer, device="cpu"
        )
    if compatible:
        bridge.enable_compatibility_mode(disable_warnings=True)
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0

    def run():
        return bridge(tokens), bridge(tokens, attention_mask=mask)

    with tl_devicefix.disabled():
        expected = run()

    actual = run()

    lists = ("blocks", "encoder_blocks", "decoder_blocks", "L_blocks", "H_blocks")
    ways = {why_installed(block) for attribute in lists for block in getattr(bridge, attribute, ())}
    reason = AS_INSTALLED.get((name, compatible))
    if reason is None:
        assert ways == {None}
    else:
        assert all(reason in str(way) for way in ways)
    assert_agrees(actual, expected, tolerance=1e-5)
    with tl_devicefix.simulate(2):
        spread = TransformerBridge.boot_transformers(
            str(tmp_path), tokenizer=tokenizer, n_devices=2
        )
        if compatible:
            spread.enable_compatibility_mode(disable_warnings=True)
        assert len(spread.placement.devices) == 2
        assert_agrees(spread(tokens).cpu(), expected[0], tolerance=1e-5)

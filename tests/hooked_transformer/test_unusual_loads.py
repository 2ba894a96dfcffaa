"""Loads that are out of the ordinary: subclasses with state of their own, threads, odd configs."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from comparison import assert_agrees, log_probs
from hf_models import HF_CONFIGS, N_LAYERS, make_hf_model
from torch import nn
from transformer_lens import HookedTransformer, HookedTransformerConfig
from transformers import AutoModelForCausalLM

import tl_devicefix

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


class WithProbe(HookedTransformer):
    """A subclass that adds a parameter, a module and a buffer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scale = nn.Parameter(torch.full((2,), 3.0))
        self.probe = nn.Linear(2, 2)
        self.register_buffer("seen", torch.arange(3))


def test_what_a_subclass_adds_keeps_its_values_and_is_at_home(checkpoints):
    with tl_devicefix.simulate(3):
        model = WithProbe.from_pretrained(checkpoints("gpt2"), n_devices=3)
        assert {t.device for t in (model.scale, model.probe.weight, model.seen)} == {
            model.placement.home
        }
        assert model.scale.tolist() == [3.0, 3.0]
        assert model.seen.tolist() == [0, 1, 2]
        assert not model.probe.weight.is_meta


def test_threads_may_load_at_once(checkpoints):
    alone = HookedTransformer.from_pretrained(checkpoints("gpt2"), device="cpu")
    with ThreadPoolExecutor(3) as pool:
        loads = [
            pool.submit(HookedTransformer.from_pretrained, checkpoints("gpt2"), device="cpu")
            for _ in range(3)
        ]
        models = [load.result() for load in loads]
    for model in models:
        torch.testing.assert_close(model(TOKENS), alone(TOKENS), rtol=0, atol=0)
    # Nothing that loading replaces for a moment is left behind.
    cfg = HookedTransformerConfig(
        n_layers=1, d_model=8, n_heads=2, d_head=4, d_vocab=9, n_ctx=5, act_fn="relu", device="cpu"
    )
    assert not any(parameter.is_meta for parameter in HookedTransformer(cfg).parameters())


@pytest.mark.parametrize("name", ["transformer.h.0.attn.bias", "transformer.h.1.attn.masked_bias"])
def test_the_masks_that_old_checkpoints_store_are_ignored(name, tmp_path):
    hf_model = make_hf_model(HF_CONFIGS["gpt-j"]())
    hf_model.save_pretrained(tmp_path, state_dict={**hf_model.state_dict(), name: torch.ones(3)})
    assert HookedTransformer.from_pretrained(tmp_path, device="cpu").cfg.n_layers == N_LAYERS


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [("pythia", "use_parallel_residual", False), ("gpt2", "scale_attn_by_inverse_layer_idx", True)],
)
def test_what_config_json_says_is_not_overlooked(name, field, value, tmp_path):
    config = HF_CONFIGS[name]()
    setattr(config, field, value)
    make_hf_model(config).save_pretrained(tmp_path)
    try:
        model = HookedTransformer.from_pretrained(tmp_path, device="cpu")
    except ValueError as error:
        if "released together" not in str(error):
            raise
        pytest.skip(f"TransformerLens itself cannot convert it here: {error}")
    # transformers 4's sdpa attention overlooks the scaling by layer.
    hf_model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    expected = hf_model(TOKENS).logits.log_softmax(-1)
    assert_agrees(log_probs(model, TOKENS), expected, tolerance=1e-4)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"attention_bias": True}, "attention_bias=True"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "'linear'"),
    ],
)
def test_a_llama_that_would_be_wrong_is_refused(changes, says, tmp_path):
    make_hf_model(HF_CONFIGS["llama"]()).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("rope_parameters", None)
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ValueError, match=says):
        HookedTransformer.from_pretrained(tmp_path, device="cpu")


def test_float32_weights_are_folded_in_the_float64_of_their_model(checkpoints):
    load = partial(HookedTransformer.from_pretrained_no_processing, checkpoints("gpt2"))
    source, model = load(device="cpu"), load(device="cpu", dtype=torch.float64)
    model.load_and_process_state_dict(source.state_dict())
    # TransformerLens itself rounds to float32 in between.
    wide = source.W_E.double()
    assert torch.equal(model.W_E, wide - wide.mean(-1, keepdim=True))


def test_a_processed_model_is_placed_by_what_it_weighs_now(checkpoints):
    with tl_devicefix.simulate(2):
        model = HookedTransformer.from_pretrained_no_processing(checkpoints("gpt2"), n_devices=2)
        model.process_weights_()
        for component in model.placement.components:
            parameters = model.get_submodule(component.name).parameters()
            assert component.weights == sum(parameter.nbytes for parameter in parameters)


@pytest.mark.fails_unpatched
def test_devices_that_are_simulated_are_the_default(machine):
    sizes = {"n_layers": 4, "d_model": 8, "n_ctx": 8, "d_head": 4, "d_vocab": 9}
    cfg = HookedTransformerConfig(**sizes, act_fn="relu", n_devices=4)
    assert torch.device(cfg.device) == machine.devices[0]
    placed = {p.device for p in HookedTransformer(cfg).parameters()}
    assert placed == set(machine.devices)

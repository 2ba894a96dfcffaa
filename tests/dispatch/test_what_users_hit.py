"""Crashes that users of TransformerLens met on several devices, each as one test.

The numbers are those of TransformerLens's issues.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from architectures import (
    ARCHITECTURES,
    NO_PROCESSING,
    attention_only_config,
    load_hooked,
)
from comparison import assert_agrees
from hf_models import randomize
from kinds import devices_of, home_of, on_one_device
from transformer_lens import HookedTransformer

import tl_devicefix


def assert_runs(model: Any, reference: Any, tokens: torch.Tensor, n_devices: int) -> None:
    """It is on so many devices, and a forward, a cache and generation are as on one."""
    home = home_of(model)
    options = {"max_new_tokens": 3, "do_sample": False, "stop_at_eos": False, "verbose": False}
    expected, expected_cache = reference.run_with_cache(tokens, return_type="both")
    actual, cache = model.run_with_cache(tokens, return_type="both")
    assert_agrees([actual, cache], [expected, expected_cache], home)
    assert_agrees(
        model.generate(tokens.to(home), **options), reference.generate(tokens, **options), home
    )
    assert len(devices_of(model)) == n_devices


def test_absolute_positions_where_the_embedding_is_on_another_device(
    from_pretrained: Any, on_cpu: Any, tokens: torch.Tensor, simulated: Any
) -> None:
    with simulated(2):
        model = from_pretrained("gpt2", device_map={"": 0, "pos_embed": 1})
        assert_runs(model, on_cpu("gpt2"), tokens, 2)


@pytest.mark.fails_unpatched
@pytest.mark.parametrize("n_devices", [2, 3, 5])
def test_layer_norms_that_are_not_folded(
    n_devices: int, from_pretrained: Any, on_cpu: Any, tokens: torch.Tensor, simulated: Any
) -> None:
    with simulated(n_devices):
        model = from_pretrained("pythia", n_devices=n_devices, **NO_PROCESSING)
        assert_runs(model, on_cpu("pythia", **NO_PROCESSING), tokens, n_devices)


@pytest.mark.fails_unpatched
def test_968_one_device_slightly_freer_than_the_other(
    from_pretrained: Any, on_cpu: Any, tokens: torch.Tensor, simulated: Any
) -> None:
    with simulated(2):
        ballast = torch.zeros(1000, device="sim:0")  # of another model, or another process
        model = from_pretrained("gpt2", n_devices=2)
        assert_runs(model, on_cpu("gpt2"), tokens, 2)
        assert model.cfg.device == "sim:0"
        del ballast


@pytest.mark.fails_unpatched
@pytest.mark.parametrize("memory", [("24GiB", "80GiB"), ("80GiB", "24GiB")])
def test_968_a_small_device_beside_a_large_one(
    memory: tuple[str, str], from_pretrained: Any, on_cpu: Any, tokens: torch.Tensor, simulated: Any
) -> None:
    with simulated(2, memory=memory):
        model = from_pretrained("llama", n_devices=2)
        assert_runs(model, on_cpu("llama"), tokens, 2)


@pytest.mark.fails_unpatched
def test_906_the_devices_from_the_named_one_on(
    from_pretrained: Any, on_cpu: Any, tokens: torch.Tensor, simulated: Any
) -> None:
    with simulated(4) as machine:
        model = from_pretrained("gpt2", device="sim:2", n_devices=2)
        assert_runs(model, on_cpu("gpt2"), tokens, 2)
        assert devices_of(model) == {"sim:2", "sim:3"}
        assert machine.max_memory_allocated(0) == machine.max_memory_allocated(1) == 0


@pytest.mark.fails_unpatched
def test_199_911_inputs_follow_the_model_to_the_device_that_it_is_moved_to(
    from_pretrained: Any, on_cpu: Any, tokens: torch.Tensor, simulated: Any
) -> None:
    """As `Accelerator.prepare` moves it in its second process; the index was lost."""
    with simulated(2):
        model = from_pretrained("gpt2", n_devices=1).to(torch.device("sim:1"))
        assert model.cfg.device == "sim:1"
        assert_runs(model, on_cpu("gpt2"), tokens, 1)


@pytest.mark.fails_unpatched
@pytest.mark.parametrize(("n_layers", "n_devices"), [(26, 8), (62, 8), (32, 3)])
def test_837_layers_that_do_not_divide_by_the_devices(
    n_layers: int, n_devices: int, tokens: torch.Tensor, simulated: Any
) -> None:
    reference = HookedTransformer(attention_only_config(n_layers=n_layers))
    randomize(reference)
    with simulated(n_devices):
        cfg = attention_only_config(n_layers=n_layers, device="sim:0")
        cfg.n_devices = n_devices  # as an argument, TransformerLens would count CUDA devices
        model = HookedTransformer(cfg)
        randomize(model)
        assert_agrees(model(tokens), reference(tokens), torch.device("sim:0"), tolerance=1e-4)
        assert len(devices_of(model)) == n_devices


@pytest.mark.parametrize("unembed", [0, 2, 3])
def test_the_last_block_and_the_unembedding_on_different_devices(
    unembed: int, from_pretrained: Any, on_cpu: Any, tokens: torch.Tensor, simulated: Any
) -> None:
    device_map = {"": 0, "blocks.2": 1, "blocks.3": 2, "blocks.4": 1, "unembed": unembed}
    with simulated(4):
        model = from_pretrained("llama", device_map=device_map)
        assert_runs(model, on_cpu("llama"), tokens, len(set(device_map.values())))


@pytest.mark.fails_unpatched
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_result_of_each_head_on_several_devices(
    name: str, from_pretrained: Any, on_cpu: Any, tokens: torch.Tensor, simulated: Any
) -> None:
    reference = copy.deepcopy(on_cpu(name))
    reference.set_use_attn_result(True)
    with simulated(3):
        model = from_pretrained(name, n_devices=3)
        model.set_use_attn_result(True)
        assert_runs(model, reference, tokens, 3)


@pytest.mark.fails_unpatched
@pytest.mark.parametrize(
    "setting", ["set_use_split_qkv_input", "set_use_attn_in", "set_use_hook_mlp_in"]
)
def test_the_input_of_each_head_on_several_devices(
    setting: str, from_pretrained: Any, on_cpu: Any, tokens: torch.Tensor, simulated: Any
) -> None:
    reference = copy.deepcopy(on_cpu("gpt2"))
    getattr(reference, setting)(True)
    with simulated(3):
        model = from_pretrained("gpt2", n_devices=3)
        getattr(model, setting)(True)
        assert_runs(model, reference, tokens, 3)


@pytest.mark.fails_unpatched
@pytest.mark.parametrize("where", ["sim:0", "sim:1"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen2", "mixtral"])
def test_371_an_hf_model_that_is_on_a_device_already(
    name: str,
    where: str,
    hf_models: Any,
    tokenizer: Any,
    on_cpu: Any,
    tokens: torch.Tensor,
    simulated: Any,
) -> None:
    reference = on_cpu(name)
    with simulated(3):
        hf_model = copy.deepcopy(hf_models(name)).to(where)
        model = load_hooked(ARCHITECTURES[name], hf_model, tokenizer, n_devices=3)
        assert_agrees(model(tokens), reference(tokens), torch.device("sim:0"))
        assert (len(devices_of(model)), devices_of(hf_model)) == (3, {where})


@pytest.mark.fails_unpatched
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_872_1260_generating_a_batch_with_left_padding_and_the_kv_cache(
    name: str, dtype: torch.dtype, from_pretrained: Any, simulated: Any
) -> None:
    sentences = ["w5 w6 w7", "w8 w9 w10 w11 w12 w13", "w14"]
    options = {
        "max_new_tokens": 4,
        "do_sample": False,
        "stop_at_eos": False,
        "verbose": False,
        "padding_side": "left",
    }
    reference = from_pretrained(name, dtype=dtype, device="cpu")
    expected = on_one_device(reference.generate, sentences, **options)
    with simulated(4):
        model = from_pretrained(name, dtype=dtype, n_devices=4)
        assert len(devices_of(model)) == 4
        assert model.generate(sentences, **options) == expected


@pytest.mark.parametrize("name", ["gpt2", "llama", "bloom", "pythia"])
def test_embeddings_norm_and_unembedding_each_on_a_device_of_its_own(
    name: str, from_pretrained: Any, on_cpu: Any, tokens: torch.Tensor, simulated: Any
) -> None:
    device_map = {"blocks": 1, "embed": 3, "ln_final": 2, "unembed": 0}
    if name in ("gpt2", "bloom"):
        device_map["pos_embed"] = 0
    with simulated(4):
        model = from_pretrained(name, device_map=device_map, **NO_PROCESSING)
        assert model.cfg.device == "sim:3"
        assert_runs(model, on_cpu(name, **NO_PROCESSING), tokens, 4)


@pytest.mark.fails_unpatched
def test_698_a_misspelt_argument_is_named(from_pretrained: Any, simulated: Any) -> None:
    with simulated(4), pytest.raises(TypeError, match="'n_device'; did you mean 'n_devices'"):
        from_pretrained("gpt2", n_device=4)


def test_the_plan_of_a_model_is_what_it_gets(from_pretrained: Any, simulated: Any) -> None:
    with simulated(3):
        model = from_pretrained("gpt2", n_devices=3)
        planned = tl_devicefix.plan(model.cfg, n_devices=3).device_map
        parameters = {name: p.device for name, p in model.named_parameters()}
        assert model.placement.device_map == planned
        assert parameters == {name: model.placement.device_of(name) for name in parameters}

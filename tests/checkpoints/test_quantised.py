"""A model that bitsandbytes quantised loads as the plain model that its weights stand for."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from adapting import GPT2, LLAMA, adapter, lora, peft
from comparison import assert_same_model, log_probs
from quantising import KINDS, bitsandbytes, dequantised, is_repacked
from transformer_lens import HookedTransformer
from wide import WIDE

TARGETS = {"mistral": LLAMA, "gpt2": GPT2}


@pytest.fixture(params=WIDE)
def name(request: pytest.FixtureRequest) -> str:
    """Which of the models: Mistral's layers are Linear, GPT-2's are Conv1D, so transposed."""
    return request.param


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.cover(("name", "kind"), ("name", "processing"))
@pytest.mark.fails_unpatched
@pytest.mark.parametrize(
    ("kind", "n_devices"),
    [*((kind, 3) for kind in KINDS), *((kind, 1) for kind in list(KINDS)[:1])],
)
def test_the_model_has_the_values_that_bitsandbytes_gives(
    name: str,
    kind: str,
    processing: Any,
    quantised: Any,
    wide_models: Any,
    load: Any,
    reference_of: Any,
    tokens: torch.Tensor,
) -> None:
    hf_model = quantised(name, kind)
    plain = dequantised(hf_model, wide_models(name))
    reference = reference_of(WIDE[name], plain, **processing)

    model = load(WIDE[name], hf_model, **processing)

    assert_same_model(model, reference, tokens)


def test_that_is_what_dequantising_it_with_transformers_gives(
    kind: str, quantised: Any, load: Any, tokens: torch.Tensor
) -> None:
    hf_model = quantised("mistral", kind).dequantize()
    expected = hf_model(tokens).logits.log_softmax(dim=-1)

    model = load(WIDE["mistral"], quantised("mistral", kind))

    torch.testing.assert_close(log_probs(model, tokens), expected, rtol=0, atol=1e-5)


@pytest.mark.fails_unpatched
def test_a_model_that_was_run_has_the_values_that_it_ran_with(
    name: str,
    kind: str,
    quantised: Any,
    wide_models: Any,
    load: Any,
    reference_of: Any,
    tokens: torch.Tensor,
) -> None:
    """A forward changes the weights' layout: on some CPUs in 4 bits, and their scales' in 8.

    The kernel for CPUs with AVX512-BF16 packs 4-bit weights anew and rounds their scales.
    """
    hf_model = quantised(name, kind)
    untouched = copy.deepcopy(hf_model)
    with torch.no_grad():
        hf_model(tokens)
    plain = dequantised(untouched, wide_models(name), rounded=is_repacked(hf_model))
    reference = reference_of(WIDE[name], plain)

    model = load(WIDE[name], hf_model)

    assert_same_model(model, reference, tokens)


@pytest.mark.cover(("name", "kind"), ("name", "use_dora"))
@pytest.mark.fails_unpatched
@pytest.mark.parametrize("use_dora", [False, True], ids=["LoRA", "DoRA"])
def test_adapters_on_a_quantised_model(
    name: str,
    kind: str,
    use_dora: bool,
    quantised: Any,
    wide_models: Any,
    load: Any,
    reference_of: Any,
    tokens: torch.Tensor,
) -> None:
    """As QLoRA trains them."""
    hf_model = quantised(name, kind)
    plain = dequantised(hf_model, wide_models(name))
    hf_model = lora(*TARGETS[name], use_dora=use_dora)(hf_model)
    plain = lora(*TARGETS[name], fan_in_fan_out=name == "gpt2", use_dora=use_dora)(plain)
    reference = reference_of(WIDE[name], plain.merge_and_unload())

    model = load(WIDE[name], hf_model)

    assert_same_model(model, reference, tokens)


OTHER_METHODS = {
    "IA3": peft.IA3Config(
        target_modules=["k_proj", "down_proj"],
        feedforward_modules=["down_proj"],
        task_type="CAUSAL_LM",
    ),
    "AdaLoRA": peft.AdaLoraConfig(target_modules=list(LLAMA), total_step=10, task_type="CAUSAL_LM"),
    "VeRA": peft.VeraConfig(r=4, target_modules=["q_proj", "o_proj"], task_type="CAUSAL_LM"),
}
"""Each has its own layers over those of bitsandbytes, or none."""


@pytest.mark.fails_unpatched
@pytest.mark.parametrize("method", OTHER_METHODS)
def test_adapters_of_other_methods_on_a_quantised_model(
    method: str,
    kind: str,
    quantised: Any,
    wide_models: Any,
    load: Any,
    reference_of: Any,
    tokens: torch.Tensor,
) -> None:
    adapt = adapter(OTHER_METHODS[method])
    hf_model = quantised("mistral", kind)
    plain = adapt(dequantised(hf_model, wide_models("mistral")))
    reference = reference_of(WIDE["mistral"], plain.merge_and_unload())

    model = load(WIDE["mistral"], adapt(hf_model))

    assert_same_model(model, reference, tokens)


@pytest.mark.cover(("name", "kind"), ("kind", "was_run"))
@pytest.mark.parametrize(
    ("is_adapted", "was_run"),
    [(False, False), (False, True), (True, True)],
    ids=["new", "run", "adapted and run"],
)
def test_the_quantised_model_is_unchanged(
    name: str,
    kind: str,
    is_adapted: bool,
    was_run: bool,
    quantised: Any,
    load: Any,
    snapshot: Any,
    predictions: Any,
    tokens: torch.Tensor,
) -> None:
    hf_model = quantised(name, kind)
    if is_adapted:
        hf_model = lora(*TARGETS[name])(hf_model)
    expected = predictions(hf_model if was_run else copy.deepcopy(hf_model), tokens)
    before = snapshot(hf_model)

    load(WIDE[name], hf_model)

    before.assert_unchanged()
    assert torch.equal(predictions(hf_model, tokens), expected)


def test_a_quantised_checkpoint_is_loaded_by_its_path(
    name: str,
    kind: str,
    quantised: Any,
    load: Any,
    tokenizer: Any,
    tmp_path: Path,
    tokens: torch.Tensor,
) -> None:
    hf_model = quantised(name, kind)
    hf_model.save_pretrained(tmp_path)
    expected = log_probs(load(WIDE[name], hf_model), tokens)

    model = HookedTransformer.from_pretrained(str(tmp_path), n_devices=3)

    assert len(model.placement.devices) == 3
    torch.testing.assert_close(log_probs(model, tokens), expected, rtol=0, atol=1e-5)


def test_scales_that_are_lost_are_not_guessed(quantised: Any, load: Any, refused: Any) -> None:
    hf_model = quantised("mistral", "int8")
    layer = hf_model.model.layers[1].mlp.up_proj
    layer.weight.SCB = layer.state.SCB = None
    with refused("scales are lost", "load it again", hf_model=hf_model):
        load(WIDE["mistral"], hf_model)


@pytest.mark.parametrize(
    "method", ["gptq", "awq", "hqq", "torchao", "mxfp4", "fp8", "compressed-tensors"]
)
def test_another_quantisation_is_refused_by_its_name(
    method: str, hf_models: Any, load: Any, refused: Any
) -> None:
    hf_model = copy.deepcopy(hf_models("qwen2"))
    hf_model.config.quantization_config = {"quant_method": method, "bits": 4}
    with refused(method, "quantised", "cannot be undone here", hf_model=hf_model):
        load("qwen2", hf_model)


def test_layers_that_torch_quantised_are_refused(hf_models: Any, load: Any, refused: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it moves to torchao
        hf_model = torch.ao.quantization.quantize_dynamic(
            copy.deepcopy(hf_models("qwen2")), {torch.nn.Linear}
        )
    with refused("torch.ao", "quantised", "cannot be undone here", hf_model=hf_model):
        load("qwen2", hf_model)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn], ids=str)
def test_weights_of_a_byte_each_are_refused_as_their_scales_are_unknown(
    dtype: torch.dtype, hf_models: Any, load: Any, refused: Any
) -> None:
    hf_model = copy.deepcopy(hf_models("qwen2"))
    layer = hf_model.model.layers[3].mlp.up_proj
    layer.weight = torch.nn.Parameter(layer.weight.detach().to(dtype), requires_grad=False)
    with refused(str(dtype), "quantised", "cannot be undone here", hf_model=hf_model):
        load("qwen2", hf_model)


def test_an_embedding_that_bitsandbytes_quantised_is_refused(
    hf_models: Any, load: Any, refused: Any
) -> None:
    hf_model = copy.deepcopy(hf_models("qwen2"))
    embedding = bitsandbytes.nn.EmbeddingNF4(40, 16)
    embedding.weight = bitsandbytes.nn.Params4bit(
        hf_model.model.embed_tokens.weight.detach(), quant_type="nf4", requires_grad=False
    )
    hf_model.model.embed_tokens = embedding.to("cpu")
    with refused("uint8", "quantised", "cannot be undone here", hf_model=hf_model):
        load("qwen2", hf_model)


def test_without_bitsandbytes_the_refusal_says_what_to_install(
    quantised: Any, load: Any, without_library: Any, refused: Any
) -> None:
    hf_model = quantised("mistral", "nf4")
    without_library("bitsandbytes")
    says = "uses bitsandbytes, which cannot be imported", "pip install"
    with refused(*says, error=ImportError, hf_model=hf_model):
        load(WIDE["mistral"], hf_model)

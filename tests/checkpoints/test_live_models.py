"""A live model, adapted, quantised or offloaded, loads as the plain model that it stands for."""

from __future__ import annotations

import copy
import gc
import sys
from typing import Any

import peft
import pytest
import torch
from architectures import ALL_ARCHITECTURES, NO_PROCESSING, load_hooked
from comparison import assert_same_logits, assert_same_model, log_probs
from live_models import (
    CASES,
    CAUSAL,
    CONV,
    IN_GPT2,
    IN_LLAMA,
    MISTRAL,
    NOT_AS_MERGED,
    WIDE,
    Make,
    Parts,
    lora,
    on_cpu,
    on_disk,
)
from torch import nn
from transformer_lens import HookedTransformer

import tl_devicefix

ARCHITECTURES = {**ALL_ARCHITECTURES, **WIDE}


@pytest.fixture
def load(machine, tokenizer):
    """`load("gpt2", hf_model)`: over the first three devices, unless options say otherwise."""

    def load(name, hf_model, **options):
        options = {"n_devices": min(3, len(machine.devices)), **options}
        return load_hooked(ARCHITECTURES[name], hf_model, tokenizer, **options)  # type: ignore[arg-type]

    return load


@pytest.fixture
def reference_of(tokenizer):
    """`reference_of("gpt2", plain_model)`: as unpatched TransformerLens loads it on one CPU."""

    def reference_of(name, hf_model, **options):
        with tl_devicefix.disabled():
            return load_hooked(ARCHITECTURES[name], hf_model, tokenizer, device="cpu", **options)

    return reference_of


@pytest.fixture
def parts_of(hf_models, checkpoints, tmp_path_factory):
    """`parts_of("gpt2")`: what a live model is made of, anew each time."""

    def parts_of(name, *dtypes):
        folder = tmp_path_factory.mktemp("offloaded")
        return Parts(copy.deepcopy(hf_models(name, *dtypes)), checkpoints(name), folder)

    return parts_of


@torch.no_grad()
def predictions(hf_model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """What a Hugging Face model predicts, by its own forward, as `comparison.log_probs`."""
    return hf_model(tokens).logits.log_softmax(dim=-1)


@pytest.mark.cover
@pytest.mark.fails_unpatched
@pytest.mark.parametrize("processing", [{}, NO_PROCESSING], ids=["folded", "unfolded"])
@pytest.mark.parametrize("name", CASES)
def test_it_is_the_plain_model_and_goes_on_as_before(
    name, processing, parts_of, load, reference_of, snapshot, tokens
):
    case = CASES[name]
    of = case.architecture
    hf_model, another = case.live(parts_of(of)), case.live(parts_of(of))
    reference = reference_of(of, case.plain(parts_of(of)), **processing)
    before = snapshot(hf_model)

    model = load(of, hf_model, **processing)

    assert_same_model(model, reference, tokens)
    before.assert_unchanged()
    try:
        expected = predictions(another, tokens)
    except (KeyError, NotImplementedError):  # it cannot run: transformers 4 loses embeddings that
        # are tied and on disk, and PEFT does not run an offloaded DoRA
        return
    assert torch.equal(predictions(hf_model, tokens), expected)


@pytest.mark.parametrize("case", NOT_AS_MERGED)
def test_adapters_that_peft_itself_does_not_merge(case, parts_of, load, references, tokens):
    name, adapt = NOT_AS_MERGED[case]
    references(name)  # skips where TransformerLens itself cannot read it
    hf_model = adapt(parts_of(name).model)
    unfolded = {"fold_ln": False} if name == "mixtral" else {}  # TransformerLens 2 drops its norms
    model = load(name, hf_model, n_devices=1, **unfolded)
    expected = predictions(hf_model, tokens)
    torch.testing.assert_close(log_probs(model, tokens), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "adapt"),
    [("llama", lora(*IN_LLAMA)), ("gpt2", lora(*IN_GPT2, use_dora=True, **CONV))],
    ids=["LoRA", "DoRA"],
)
def test_adapters_of_a_bfloat16_model_are_merged_in_float32(
    name, adapt, parts_of, load, reference_of
):
    """As if all had been float64; PEFT would merge in bfloat16, and round what it merges."""
    hf_model = adapt(parts_of(name, torch.bfloat16).model)
    in_float64 = adapt(parts_of(name, torch.bfloat16, torch.float64).model)
    in_float64.load_state_dict(hf_model.state_dict())
    options = {"dtype": torch.float32, "fold_ln": False}
    exact = dict(reference_of(name, in_float64.merge_and_unload(), **options).named_parameters())
    model = load(name, hf_model, **options)
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.cpu(), exact[key], rtol=0, atol=1e-6)


@pytest.mark.fails_unpatched
def test_a_model_that_is_loaded_where_the_adapted_one_lies_shares_nothing_with_it(
    parts_of, load, snapshot
):
    hf_model = lora(*IN_GPT2, **CONV)(parts_of("gpt2").model)
    before = snapshot(hf_model)
    model = load("gpt2", hf_model, n_devices=1, device="cpu", **NO_PROCESSING)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    before.assert_unchanged()


@pytest.mark.parametrize("kind", ["nf4, scales quantised too", "int8"])
def test_a_quantised_checkpoint_is_loaded_by_its_path(
    kind, parts_of, load, tokenizer, tmp_path, tokens
):
    hf_model = CASES[f"{kind} mistral"].live(parts_of(MISTRAL))
    hf_model.save_pretrained(tmp_path)
    expected = log_probs(load(MISTRAL, hf_model), tokens)
    model = HookedTransformer.from_pretrained(str(tmp_path), n_devices=3)
    assert len(model.placement.devices) == 3
    torch.testing.assert_close(log_probs(model, tokens), expected, rtol=0, atol=1e-5)


TAKES_A_BLOCK: dict[str, Make] = {
    "LoRA": lambda parts: lora(*IN_LLAMA)(parts.model),
    "DoRA": lambda parts: lora(*IN_LLAMA, use_dora=True)(parts.model),
    "nf4": CASES["nf4 mistral"].live,
    "disk": on_disk(),
}


@pytest.mark.cover
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("how", TAKES_A_BLOCK)
def test_computing_weights_takes_about_a_block_of_memory_and_only_while_loading(
    how, dtype, parts_of, load, machine
):
    """Beyond what loading a plain model takes: the block in float32, and for DoRA a layer of it."""

    def load_on(device, hf_model):
        return load(MISTRAL, hf_model, n_devices=1, device=device, dtype=dtype)

    model = load_on("sim:0", parts_of(MISTRAL).model)
    same_model = load_on("sim:1", TAKES_A_BLOCK[how](parts_of(MISTRAL)))
    gc.collect()

    block = max(c.weights for c in model.placement.components) * 4 // dtype.itemsize
    extra = machine.max_memory_allocated("sim:1") - machine.max_memory_allocated("sim:0")
    assert extra <= 1.4 * block
    share = same_model.placement.bytes_on(torch.device("sim:1"))
    assert machine.memory_allocated("sim:1") == share == machine.memory_allocated("sim:0")


def without_scales(parts: Parts) -> Any:
    hf_model = CASES["int8 mistral"].live(parts)
    layer = hf_model.model.layers[1].mlp.up_proj
    layer.weight.SCB = layer.state.SCB = None
    return hf_model


def quantised_by_gptq(parts: Parts) -> Any:
    parts.model.config.quantization_config = {"quant_method": "gptq", "bits": 4}
    return parts.model


def of_a_byte(parts: Parts) -> Any:
    layer = parts.model.model.layers[3].mlp.up_proj
    layer.weight = nn.Parameter(layer.weight.detach().to(torch.int8), requires_grad=False)
    return parts.model


UNMERGEABLE = ("cannot be merged", "pass the base model")
QUANTISED = ("quantised", "cannot be undone here")
REFUSED: dict[str, tuple[str, Make, tuple[str, ...]]] = {
    "prompt tuning": (
        "llama",
        lambda parts: peft.get_peft_model(
            parts.model, peft.PromptTuningConfig(num_virtual_tokens=2, **CAUSAL)
        ),
        ("PROMPT_TUNING", *UNMERGEABLE),
    ),
    "LoRA that starts at certain tokens": (
        "llama",
        lambda parts: lora(*IN_LLAMA, alora_invocation_tokens=[3])(parts.model),
        ("aLoRA", *UNMERGEABLE),
    ),
    "4 bits, offloaded": (
        MISTRAL,
        on_cpu(CASES["nf4 mistral"].live),
        ("scales are lost", "without offloading"),
    ),
    "8 bits without scales": (MISTRAL, without_scales, ("scales are lost", "load it again")),
    "gptq": ("qwen2", quantised_by_gptq, ("gptq", *QUANTISED)),
    "int8 without a scale": ("qwen2", of_a_byte, ("torch.int8", *QUANTISED)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_plain_weights_is_refused(case, parts_of, load, refused):
    name, make, says = REFUSED[case]
    hf_model = make(parts_of(name))
    with refused(*says, hf_model=hf_model):
        load(name, hf_model)


def test_a_plain_model_needs_no_optional_library(hf_models, load, references, monkeypatch, tokens):
    for library in ("peft", "bitsandbytes"):  # what is in use of them goes on
        for module in [loaded for loaded in sys.modules if loaded.split(".")[0] == library]:
            monkeypatch.delitem(sys.modules, module)
        monkeypatch.setitem(sys.modules, library, None)
    assert_same_logits(load("llama", hf_models("llama")), references("llama"), tokens)

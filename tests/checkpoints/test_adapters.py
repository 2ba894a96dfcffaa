"""A model with PEFT adapters loads as what the active adapters make of it, merged in float32."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from adapting import GPT2, LLAMA, Adapt, adapter, config, lora, peft, train
from comparison import assert_same_logits, assert_same_model, log_probs
from packaging.version import Version
from transformers import PreTrainedModel

EXPERTS_ARE_PARAMETERS = Version(transformers.__version__) >= Version("5")


def added_by_transformers(model: PreTrainedModel) -> PreTrainedModel:
    """With the adapter of `lora(*LLAMA)`, but without a PeftModel around it."""
    trained = peft.get_peft_model_state_dict(lora(*LLAMA)(copy.deepcopy(model)), adapter_name="0")
    model.add_adapter(config(*LLAMA), adapter_name="0")
    names = {f"base_model.model.{name}": p for name, p in model.named_parameters()}
    with torch.no_grad():
        for name, value in trained.items():
            names[name.replace(".weight", ".0.weight")].copy_(value)
    return model.eval()


def merged_by_its_user(model: PreTrainedModel) -> Any:
    adapted = lora(*LLAMA)(model)
    adapted.merge_adapter()
    return adapted


def mixed(model: PreTrainedModel) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        adapted = peft.get_peft_model(model, config("q_proj", task_type=None), "0", mixed=True)
        adapted.add_adapter("1", peft.LoHaConfig(r=4, target_modules=["q_proj", "up_proj"]))
        train(p for name, p in adapted.named_parameters() if "lora_" in name or "hada_" in name)
    adapted.set_adapter(["0", "1"])
    return adapted.eval()


@dataclass(frozen=True)
class Case:
    """An adapted model, and, if PEFT cannot merge it, the PeftModel that it is the same as."""

    architecture: str
    adapt: Adapt
    merge: Adapt | None = None

    def reference(self, model: PreTrainedModel) -> PreTrainedModel:
        return (self.merge or self.adapt)(model).merge_and_unload()


CASES = {
    "LoRA on a Llama": Case("llama", lora(*LLAMA)),
    "LoRA on a GPT-2, whose layers are Conv1D": Case("gpt2", lora(*GPT2, fan_in_fan_out=True)),
    "LoRA on a Mistral": Case("mistral", lora(*LLAMA)),
    "LoRA on the embedding and the unembedding": Case("llama", lora("embed_tokens", "lm_head")),
    "LoRA with all biases trained": Case("gpt2", lora(*GPT2, fan_in_fan_out=True, bias="all")),
    "LoRA with biases of its own": Case("qwen2", lora("q_proj", lora_bias=True)),
    "DoRA": Case("llama", lora(*LLAMA, use_dora=True)),
    "DoRA on Conv1D": Case("gpt2", lora(*GPT2, use_dora=True, fan_in_fan_out=True)),
    "IA3": Case(
        "llama",
        adapter(
            peft.IA3Config(
                target_modules=["k_proj", "down_proj"],
                feedforward_modules=["down_proj"],
                task_type="CAUSAL_LM",
            )
        ),
    ),
    "norms": Case(
        "llama", adapter(peft.LNTuningConfig(target_modules=["norm"], task_type="CAUSAL_LM"))
    ),
    "modules to save": Case("llama", lora("q_proj", modules_to_save=["lm_head", "norm", "mlp"])),
    "trainable tokens": Case("llama", lora(*LLAMA, trainable_token_indices={"embed_tokens": [5]})),
    "two adapters at once": Case(
        "llama", adapter(config(*LLAMA), config("q_proj", "o_proj"), active=["0", "1"])
    ),
    "the second of two adapters": Case(
        "llama", adapter(config(*LLAMA), config("q_proj", "o_proj"), active=["1"])
    ),
    "a tuner out of its PeftModel": Case(
        "llama", lambda model: lora(*LLAMA)(model).base_model, lora(*LLAMA)
    ),
    "a model out of its PeftModel": Case(
        "llama", lambda model: lora(*LLAMA)(model).get_base_model(), lora(*LLAMA)
    ),
    "an adapter that transformers added": Case("llama", added_by_transformers, lora(*LLAMA)),
    "an adapter that its user merged": Case("llama", merged_by_its_user, lora(*LLAMA)),
}

NOT_AS_MERGED: dict[str, tuple[str, Adapt]] = {
    "LoRA on an embedding that is tied": ("gpt2", lora("wte")),
    "LoRA and LoHa": ("llama", mixed),
    "LoRA on experts": (
        "mixtral",
        lora("q_proj", target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
        if EXPERTS_ARE_PARAMETERS
        else lora("q_proj", "w1", "w2", "w3"),
    ),
}
"""What PEFT's own merge_and_unload would make another model of, or refuse."""

AS_MERGED = pytest.mark.full("by default it is compared with the merged model")
ADAPT = {**{name: (c.architecture, c.adapt) for name, c in CASES.items()}, **NOT_AS_MERGED}


@pytest.fixture
def adapted(hf_models: Any) -> Callable[..., Any]:
    """`adapted("llama", lora("q_proj"))`: a new model, with adapters that do something."""

    def adapted(name: str, adapt: Adapt, *dtypes: torch.dtype) -> Any:
        return adapt(copy.deepcopy(hf_models(name, *dtypes)))

    return adapted


@pytest.mark.cover
@pytest.mark.fails_unpatched
@pytest.mark.parametrize(
    ("case", "n_devices"),
    [*((case, 3) for case in CASES), *((case, 1) for case in list(CASES)[:3])],
)
def test_the_model_is_the_merged_one(
    case: str,
    processing: Any,
    hf_models: Any,
    adapted: Any,
    load: Any,
    reference_of: Any,
    tokens: torch.Tensor,
) -> None:
    name, adapt = CASES[case].architecture, CASES[case].adapt
    merged = CASES[case].reference(copy.deepcopy(hf_models(name)))
    reference = reference_of(name, merged, **processing)

    model = load(name, adapted(name, adapt), **processing)

    assert_same_model(model, reference, tokens)


@pytest.mark.fails_unpatched
@pytest.mark.parametrize("n_devices", [1])
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case in NOT_AS_MERGED else AS_MERGED) for case in ADAPT],
)
def test_the_model_predicts_what_the_adapted_model_predicts(
    case: str, adapted: Any, load: Any, references: Any, predictions: Any, tokens: torch.Tensor
) -> None:
    name, adapt = ADAPT[case]
    references(name)  # skips where TransformerLens itself cannot read it
    hf_model = adapted(name, adapt)
    unfolded = {"fold_ln": False} if name == "mixtral" else {}  # TransformerLens 2 drops its norms

    model = load(name, hf_model, **unfolded)

    torch.testing.assert_close(
        log_probs(model, tokens), predictions(hf_model, tokens), rtol=0, atol=1e-4
    )


def disabled(model: PreTrainedModel) -> Any:
    adapted = lora(*LLAMA, modules_to_save=["lm_head", "norm"])(model)
    adapted.base_model.disable_adapter_layers()
    return adapted


def merged_and_disabled(model: PreTrainedModel) -> Any:
    adapted = merged_by_its_user(model)
    adapted.base_model.disable_adapter_layers()
    return adapted


def disabled_by_transformers(model: PreTrainedModel) -> Any:
    model = added_by_transformers(model)
    model.disable_adapters()
    return model


@pytest.mark.parametrize("adapt", [disabled, merged_and_disabled, disabled_by_transformers])
def test_adapters_that_are_disabled_are_left_out(
    adapt: Adapt, processing: Any, adapted: Any, load: Any, references: Any, tokens: torch.Tensor
) -> None:
    model = load("llama", adapted("llama", adapt), **processing)
    assert_same_model(model, references("llama", **processing), tokens)


@pytest.mark.parametrize("case", ["LoRA on a Llama", "DoRA on Conv1D", "modules to save"])
def test_the_adapted_model_is_unchanged_and_can_be_trained_on(
    case: str, adapted: Any, load: Any, snapshot: Any, tokens: torch.Tensor
) -> None:
    name, adapt = ADAPT[case]
    hf_model = adapted(name, adapt)
    logits = hf_model(tokens).logits
    before = snapshot(hf_model)

    load(name, hf_model)

    before.assert_unchanged()
    assert not any(getattr(module, "merged", False) for module in hf_model.modules())
    assert torch.equal(hf_model(tokens).logits, logits)
    hf_model(tokens, labels=tokens).loss.backward()
    trainable = [p for p in hf_model.parameters() if p.requires_grad]
    assert trainable
    assert all(p.grad is not None and p.grad.any() for p in trainable)


def test_an_adapted_model_may_lie_on_a_device_of_its_own(
    adapted: Any, load: Any, machine: Any, snapshot: Any, reference_of: Any, tokens: torch.Tensor
) -> None:
    hf_model = adapted("llama", lora(*LLAMA, use_dora=True))
    merged = copy.deepcopy(hf_model).merge_and_unload()
    hf_model.to("sim:3")
    before, held = snapshot(hf_model), machine.memory_allocated("sim:3")
    machine.reset_peak_memory_stats("sim:3")

    model = load("llama", hf_model)

    before.assert_unchanged()
    # Its adapters are merged where the new model lies; here, there are only missing biases.
    assert machine.max_memory_allocated("sim:3") - held < 0.02 * held
    assert_same_model(model, reference_of("llama", merged), tokens)


@pytest.mark.parametrize("case", ["LoRA on a Llama", "DoRA on Conv1D"])
def test_adapters_of_a_bfloat16_model_are_merged_in_float32(
    case: str, adapted: Any, load: Any, hf_models: Any, reference_of: Any
) -> None:
    """As if all had been float64; PEFT would merge in bfloat16, and round what it merges."""
    name, adapt = ADAPT[case]
    hf_model = adapted(name, adapt, torch.bfloat16)
    in_float64 = adapted(name, adapt, torch.bfloat16, torch.float64)
    in_float64.load_state_dict(hf_model.state_dict())
    options = {"dtype": torch.float32, "fold_ln": False}
    exact = dict(reference_of(name, in_float64.merge_and_unload(), **options).named_parameters())

    def error(parameters: Any) -> float:
        return max((p.cpu() - exact[name]).abs().max().item() for name, p in parameters)

    model = load(name, hf_model, **options)
    in_bfloat16 = reference_of(name, hf_model.merge_and_unload(), **options)

    assert error(model.named_parameters()) < 1e-6
    assert error(in_bfloat16.named_parameters()) > 1e-3


@pytest.mark.fails_unpatched
def test_a_model_that_is_loaded_where_the_adapted_one_lies_shares_nothing_with_it(
    processing: Any,
    adapted: Any,
    load: Any,
    snapshot: Any,
    reference_of: Any,
    tokens: torch.Tensor,
) -> None:
    name, adapt = ADAPT["LoRA on a GPT-2, whose layers are Conv1D"]
    hf_model = adapted(name, adapt)
    reference = reference_of(name, copy.deepcopy(hf_model).merge_and_unload(), **processing)
    before = snapshot(hf_model)

    model = load(name, hf_model, n_devices=1, device="cpu", **processing)

    assert_same_model(model, reference, tokens)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    before.assert_unchanged()


UNMERGEABLE: dict[str, tuple[Adapt, str]] = {
    "prompt tuning": (
        lambda m: peft.get_peft_model(
            m, peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
        ),
        "PROMPT_TUNING",
    ),
    "prefix tuning": (
        lambda m: peft.get_peft_model(
            m, peft.PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
        ),
        "PREFIX_TUNING",
    ),
    "prompts within the attention": (
        lambda m: peft.get_peft_model(
            m, peft.AdaptionPromptConfig(adapter_len=2, adapter_layers=1, task_type="CAUSAL_LM")
        ),
        "ADAPTION_PROMPT",
    ),
    "prompts within the attention of a base model": (
        lambda m: peft.get_peft_model(
            m, peft.AdaptionPromptConfig(adapter_len=2, adapter_layers=1, task_type="CAUSAL_LM")
        ).get_base_model(),
        "AdaptedAttention",
    ),
    "LoRA that starts at certain tokens": (lora(*LLAMA, alora_invocation_tokens=[3]), "aLoRA"),
    "a bias where the model has no place for one": (lora("q_proj", lora_bias=True), "no bias"),
}


@pytest.mark.parametrize("case", UNMERGEABLE)
def test_an_adapter_that_does_more_than_change_weights_is_refused(
    case: str, adapted: Any, load: Any, refused: Any
) -> None:
    adapt, says = UNMERGEABLE[case]
    hf_model = adapted("llama", adapt)
    with refused(says, "cannot be merged", "pass the base model", hf_model=hf_model):
        load("llama", hf_model)


def test_without_peft_the_refusal_says_what_to_install(
    adapted: Any, load: Any, without_library: Any, refused: Any
) -> None:
    hf_model = adapted("llama", lora(*LLAMA))
    without_library("peft")
    says = "uses peft, which cannot be imported", "pip install"
    with refused(*says, error=ImportError, hf_model=hf_model):
        load("llama", hf_model)


def test_a_plain_model_needs_no_optional_library(
    hf_models: Any, load: Any, references: Any, without_library: Any, tokens: torch.Tensor
) -> None:
    for library in ("peft", "bitsandbytes"):
        without_library(library)
    assert_same_logits(load("llama", hf_models("llama")), references("llama"), tokens)

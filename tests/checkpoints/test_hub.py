"""A checkpoint is loaded by its name on the hub, whether TransformerLens lists it or not.

What is fetched is laid out in the hub's cache beforehand; there is no network.
"""

from __future__ import annotations

import copy
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_lens.loading_from_pretrained as tl_loading
import transformers.dynamic_module_utils
import transformers.utils.hub
from architectures import ALL_ARCHITECTURES
from comparison import assert_same_model, assert_same_weights
from hf_models import make_tokenizer, randomize
from hub_cache import HubCache, commit_of
from transformer_lens import HookedTransformer

import tl_devicefix
from tl_devicefix import plan

FINE_TUNE = "someone/not-a-gemma-2-nor-llama"
"""The name of a tiny Qwen2 that TransformerLens does not list, and would misread if it did."""


@pytest.fixture
def fine_tune(hub: HubCache, hf_models: Any, tokenizer: Any) -> str:
    hub.add(FINE_TUNE, hf_models("qwen2"), tokenizer)
    return FINE_TUNE


def scaled(hf_model: Any, factor: float) -> Any:
    """A copy with other weights, so that it can be told apart."""
    other = copy.deepcopy(hf_model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(factor)
    return other


def assert_embeds_as(model: HookedTransformer, hf_model: Any) -> None:
    """Without processing, W_E is the checkpoint's own."""
    embedding = hf_model.get_input_embeddings().weight.detach()
    assert torch.equal(model.W_E.detach().cpu(), embedding)


def assert_predicts_as(model: HookedTransformer, hf_model: Any, tokens: torch.Tensor) -> None:
    """The log probabilities are those of transformers."""
    actual, expected = model(tokens).cpu(), hf_model(tokens).logits
    torch.testing.assert_close(
        actual.log_softmax(-1), expected.log_softmax(-1), rtol=1e-4, atol=1e-4
    )


# --------------------------------------------------------------------------------------------
# Names that TransformerLens lists


@pytest.mark.fails_unpatched
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gpt2", "mistral"])
def test_a_listed_name_is_the_model_that_transformer_lens_loads_by_it(
    architecture: str, hub: HubCache, hf_models: Any, tokenizer: Any, machine: Any, tokens: Any
) -> None:
    name = ALL_ARCHITECTURES[architecture].official_name
    hub.add(name, hf_models(architecture), tokenizer)
    with tl_devicefix.disabled():
        reference = HookedTransformer.from_pretrained(name, device="cpu")

    model = HookedTransformer.from_pretrained(name, n_devices=3)

    assert_same_model(model, reference, tokens)
    assert model.cfg.model_name == reference.cfg.model_name
    assert model.tokenizer.get_vocab() == reference.tokenizer.get_vocab()
    assert model.to_tokens("w5 w7").tolist() == reference.to_tokens("w5 w7").tolist()


# --------------------------------------------------------------------------------------------
# Names that it does not list


@pytest.mark.fails_unpatched
@pytest.mark.parametrize("n_devices", [1, 3])
def test_a_fine_tune_is_loaded_by_its_own_name(
    n_devices: int, fine_tune: str, references: Any, machine: Any, tokens: Any
) -> None:
    model = HookedTransformer.from_pretrained(fine_tune, n_devices=n_devices)

    assert_same_model(model, references("qwen2"), tokens)
    assert model.cfg.original_architecture == "Qwen2ForCausalLM"
    assert model.cfg.model_name == "not-a-gemma-2-nor-llama"


@pytest.mark.parametrize(
    "architecture",
    [
        *("gpt2", "gemma-2", "gemma-3", "pythia", "phi", "qwen3", "olmo", "olmo-2"),
    ],
)
def test_a_fine_tune_of_any_architecture(
    architecture: str,
    hub: HubCache,
    hf_models: Any,
    tokenizer: Any,
    references: Any,
    machine: Any,
    tokens: Any,
) -> None:
    reference = references(architecture)
    hub.add("someone/tune", hf_models(architecture), tokenizer)

    model = HookedTransformer.from_pretrained("someone/tune", n_devices=2)

    assert_same_model(model, reference, tokens)


@pytest.mark.parametrize(
    "name", ["someone/t5-like", "bert/mine", "someone/dolphin.7b_v2", "NeelNanda/of-mine"]
)
def test_any_name_will_do(
    name: str, hub: HubCache, hf_models: Any, tokenizer: Any, machine: Any
) -> None:
    hub.add(name, hf_models("qwen2"), tokenizer)

    model = HookedTransformer.from_pretrained_no_processing(name, n_devices=2)

    assert_embeds_as(model, hf_models("qwen2"))
    assert model.tokenizer is not None


def test_the_text_model_of_a_multimodal_fine_tune(
    hub: HubCache, tokenizer: Any, machine: Any, tokens: Any
) -> None:
    name = "google/gemma-3-4b-it"
    if name not in tl_loading.OFFICIAL_MODEL_NAMES:
        pytest.skip(f"the installed TransformerLens has no {name}")
    text = ALL_ARCHITECTURES["gemma-3"].hf_config()
    vision = {
        "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "image_size": 16,
        "patch_size": 8, "num_hidden_layers": text.num_hidden_layers,
    }  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=text.to_dict(), vision_config=vision, mm_tokens_per_image=4
    )
    hf_model = transformers.Gemma3ForConditionalGeneration(config).eval()
    randomize(hf_model)
    hf_model.config.architectures = ["Gemma3ForConditionalGeneration"]
    hub.add("someone/sees", hf_model, tokenizer)

    model = HookedTransformer.from_pretrained("someone/sees", n_devices=2)

    assert_predicts_as(model, hf_model, tokens)


def test_a_name_may_be_given_with_the_model_itself(
    hub: HubCache, hf_models: Any, references: Any, machine: Any, tokens: Any
) -> None:
    snapshot = hub.add(FINE_TUNE, hf_models("qwen2"))
    for file in snapshot.glob("*.safetensors"):
        file.unlink()

    model = HookedTransformer.from_pretrained(FINE_TUNE, hf_model=hf_models("qwen2"), n_devices=3)

    assert_same_weights(model, references("qwen2"))


# --------------------------------------------------------------------------------------------
# The tokenizer


@pytest.mark.fails_unpatched
def test_its_tokenizer_comes_along(
    hub: HubCache, hf_models: Any, tokenizer: Any, references: Any, machine: Any
) -> None:
    references("pythia")  # skips where TransformerLens itself cannot read it
    hub.add(FINE_TUNE, hf_models("pythia"), tokenizer)

    model = HookedTransformer.from_pretrained(FINE_TUNE, n_devices=2)

    assert model.cfg.tokenizer_name == model.tokenizer.name_or_path == FINE_TUNE
    assert model.tokenizer.get_vocab() == tokenizer.get_vocab()
    assert model.to_tokens("w5 w7")[0, -2:].tolist() == [5, 7]
    assert str(model("w5 w7").device) == model.cfg.device


@pytest.mark.fails_unpatched
def test_without_a_tokenizer_there_the_model_has_none(
    hub: HubCache, hf_models: Any, machine: Any, tokens: Any
) -> None:
    hub.add(FINE_TUNE, hf_models("qwen2"))

    model = HookedTransformer.from_pretrained(FINE_TUNE, n_devices=2)

    assert model.tokenizer is None
    assert model(tokens).shape[:2] == tokens.shape


# --------------------------------------------------------------------------------------------
# How it is fetched


@pytest.mark.fails_unpatched
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
@pytest.mark.parametrize("listed", [False, True], ids=["not listed", "listed"])
def test_a_revision_is_that_one_s_config_weights_and_tokenizer(
    listed: bool,
    architecture: str,
    hub: HubCache,
    hf_models: Any,
    tokenizer: Any,
    machine: Any,
    tmp_path: Path,
) -> None:
    name = ALL_ARCHITECTURES[architecture].official_name if listed else FINE_TUNE
    later_tokenizer = make_tokenizer(tmp_path / "tokenizer")
    later_tokenizer.add_tokens(["later"])
    of_revision = {"main": hf_models(architecture), "v2": scaled(hf_models(architecture), 0.5)}
    of_revision["v2"].config.rms_norm_eps = 0.001
    hub.add(name, of_revision["main"], tokenizer)
    hub.add(name, of_revision["v2"], later_tokenizer, revision="v2")

    for asked, revision in ({}, "main"), ({"revision": "main"}, "main"), ({"revision": "v2"}, "v2"):
        model = HookedTransformer.from_pretrained_no_processing(name, n_devices=2, **asked)

        assert_embeds_as(model, of_revision[revision])
        assert model.cfg.eps == of_revision[revision].config.rms_norm_eps
        assert ("later" in model.tokenizer.get_vocab()) == (revision == "v2")


def test_a_revision_may_be_a_commit(
    fine_tune: str, hub: HubCache, hf_models: Any, machine: Any
) -> None:
    other = scaled(hf_models("qwen2"), 0.5)
    hub.add(fine_tune, other, revision="v2")

    model = HookedTransformer.from_pretrained_no_processing(
        fine_tune, revision=commit_of(fine_tune, "v2"), n_devices=2
    )

    assert_embeds_as(model, other)


@pytest.mark.fails_unpatched
@pytest.mark.parametrize("architecture", ["llama", "phi", "qwen3"])
@pytest.mark.parametrize("listed", [False, True], ids=["not listed", "listed"])
def test_cache_dir_is_where_config_weights_and_tokenizer_are(
    listed: bool,
    architecture: str,
    hub: HubCache,
    hf_models: Any,
    tokenizer: Any,
    machine: Any,
    tmp_path: Path,
) -> None:
    hf_model = hf_models(architecture)
    name = ALL_ARCHITECTURES[architecture].official_name if listed else FINE_TUNE
    HubCache(tmp_path / "elsewhere").add(name, hf_model, tokenizer)

    model = HookedTransformer.from_pretrained_no_processing(
        name, n_devices=2, cache_dir=tmp_path / "elsewhere"
    )

    assert_embeds_as(model, hf_model)
    assert model.tokenizer.get_vocab() == tokenizer.get_vocab()
    assert not hub.directory.exists()


@pytest.mark.fails_unpatched
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("listed", [False, True], ids=["not listed", "listed"])
def test_a_token_is_used_for_config_weights_and_tokenizer(
    listed: bool,
    architecture: str,
    hub: HubCache,
    hf_models: Any,
    tokenizer: Any,
    machine: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """TransformerLens gives transformers one from HF_TOKEN, and a second is an error."""
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_environment")
    name = ALL_ARCHITECTURES[architecture].official_name if listed else FINE_TUNE
    hub.add(name, hf_models(architecture), tokenizer)
    tokens_of: dict[str, set[str]] = {}

    def spy(kind: Any) -> None:
        fetch = kind.from_pretrained

        def fetched(*args: Any, **kwargs: Any) -> Any:
            tokens_of.setdefault(kind.__name__, set()).add(kwargs.get("token"))
            return fetch(*args, **kwargs)

        monkeypatch.setattr(kind, "from_pretrained", fetched)

    for kind in (
        transformers.AutoConfig,
        transformers.AutoModelForCausalLM,
        transformers.AutoTokenizer,
    ):
        spy(kind)

    HookedTransformer.from_pretrained(name, n_devices=2, token="hf_given")

    assert tokens_of["AutoModelForCausalLM"] == {"hf_given"}
    assert tokens_of["AutoTokenizer"] == {"hf_given"}
    if listed:  # else it is read from the folder that was fetched
        assert tokens_of["AutoConfig"] == {"hf_given"}


@pytest.mark.parametrize("name", [FINE_TUNE, "Qwen/Qwen2-0.5B"])
def test_local_files_only(
    name: str, hub: HubCache, hf_models: Any, tokenizer: Any, machine: Any
) -> None:
    hub.add(name, hf_models("qwen2"), tokenizer)

    model = HookedTransformer.from_pretrained_no_processing(
        name, n_devices=2, local_files_only=True
    )

    assert_embeds_as(model, hf_models("qwen2"))
    assert model.tokenizer is not None


def test_a_subfolder(
    hub: HubCache, hf_models: Any, tokenizer: Any, references: Any, machine: Any, tokens: Any
) -> None:
    snapshot = hub.add("someone/collection", hf_models("gpt2"))
    hf_models("qwen2").save_pretrained(snapshot / "small")
    tokenizer.save_pretrained(snapshot / "small")

    model = HookedTransformer.from_pretrained("someone/collection", subfolder="small", n_devices=2)

    assert_same_model(model, references("qwen2"), tokens)
    assert model.tokenizer.get_vocab() == tokenizer.get_vocab()


# --------------------------------------------------------------------------------------------
# Planning


@pytest.mark.parametrize("options", [{"n_devices": 3}, {"device_map": "sequential"}], ids=str)
def test_the_plan_by_a_name_is_where_it_is_then_loaded(
    options: dict[str, Any], fine_tune: str, machine: Any
) -> None:
    planned = plan(fine_tune, dtype="bfloat16", **options)

    model = HookedTransformer.from_pretrained(fine_tune, dtype="bfloat16", **options)

    assert model.placement.device_map == planned.device_map


def test_a_plan_needs_no_weights(hub: HubCache, hf_models: Any, machine: Any) -> None:
    snapshot = hub.add(FINE_TUNE, hf_models("qwen2"))
    for file in snapshot.glob("*.safetensors"):
        file.unlink()

    assert len(plan(FINE_TUNE, n_devices=4).devices) == 4


# --------------------------------------------------------------------------------------------
# Refusals, each in one sentence


def refusal(
    name: str, call: Callable[..., Any] = HookedTransformer.from_pretrained, **options: Any
) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (what it says is checked)
        call(name, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_an_architecture_that_is_not_supported_is_named_with_those_that_are(
    hub: HubCache, machine: Any
) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9}
    falcon = transformers.FalconForCausalLM(transformers.FalconConfig(**sizes))
    hub.add("someone/falcon", falcon)

    for call in (HookedTransformer.from_pretrained, plan):
        message = refusal("someone/falcon", call)
        assert "'someone/falcon' holds a FalconForCausalLM" in message
        supported = set(re.findall(r"\w+", message.partition("supports")[2]))
        assert {"LlamaForCausalLM", "Qwen2ForCausalLM", "GPT2LMHeadModel"} <= supported
        assert not {"FalconForCausalLM", "T5ForConditionalGeneration"} & supported


@pytest.mark.parametrize(
    ("unknown", "meant"), [("gpt2-smal", "gpt2-small"), ("Qwen2-0.5", "qwen2-0.5b")]
)
def test_an_unknown_name_is_answered_by_close_ones(
    unknown: str, meant: str, hub: HubCache, machine: Any
) -> None:
    message = refusal(unknown)
    assert repr(unknown) in message
    assert "did you mean" in message
    assert repr(meant) in message


def test_an_unknown_name_that_is_like_no_other(hub: HubCache, machine: Any) -> None:
    message = refusal("xyzzy")
    assert "'xyzzy'" in message
    assert "did you mean" not in message
    assert "organisation/model" in message


@pytest.mark.parametrize("options", [{}, {"local_files_only": True}], ids=str)
@pytest.mark.parametrize("name", [FINE_TUNE, "Qwen/Qwen2-0.5B"])
def test_what_is_not_cached_is_refused_with_the_hub_s_reason(
    name: str, options: dict[str, Any], hub: HubCache, machine: Any
) -> None:
    message = refusal(name, **options)
    assert repr(name) in message
    assert "couldn't find them in the cached files" in message


def test_a_training_checkpoint_of_a_fine_tune(fine_tune: str, machine: Any) -> None:
    message = refusal(fine_tune, checkpoint_index=3)
    assert "checkpoint_index" in message
    assert "leave them out" in message


# --------------------------------------------------------------------------------------------
# Code that comes with a checkpoint

CONFIGURATION = """
from transformers import LlamaConfig

class OwnConfig(LlamaConfig):
    model_type = "own"
"""
MODELLING = """
from transformers import LlamaForCausalLM
from .configuration_own import OwnConfig

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def with_code(
    hub: HubCache,
    hf_models: Any,
    tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    """The hub's name of a tiny Llama whose config is of a class that comes with it."""
    for module in (transformers.utils.hub, transformers.dynamic_module_utils):
        if hasattr(module, "HF_MODULES_CACHE"):
            monkeypatch.setattr(module, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "modules")])
    folder = hub.add("someone/own", hf_models("llama"), tokenizer)
    (folder / "configuration_own.py").write_text(CONFIGURATION)
    (folder / "modeling_own.py").write_text(MODELLING)
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "own"
    config["auto_map"] = {
        "AutoConfig": "configuration_own.OwnConfig",
        "AutoModelForCausalLM": "modeling_own.OwnModel",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return "someone/own"


def test_a_checkpoint_with_code_of_its_own_is_loaded_if_that_is_trusted(
    with_code: str, references: Any, machine: Any, tokens: Any
) -> None:
    model = HookedTransformer.from_pretrained(with_code, n_devices=2, trust_remote_code=True)

    assert_same_model(model, references("llama"), tokens)


def test_a_checkpoint_with_code_of_its_own_is_refused_otherwise(
    with_code: str, machine: Any
) -> None:
    with pytest.raises(ValueError, match="trust_remote_code"):
        HookedTransformer.from_pretrained(with_code, trust_remote_code=False)

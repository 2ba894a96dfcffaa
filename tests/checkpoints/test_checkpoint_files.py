"""The same weights, however they are stored: safetensors or pickles, one file or shards, any dtype.

And TransformerLens's own small models, which are `.pth` files in its own format.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_lens.loading_from_pretrained as tl_loading
from architectures import ALL_ARCHITECTURES, NO_PROCESSING, load_hooked
from comparison import assert_same_model, assert_same_weights, log_probs
from hf_models import (
    D_MLP,
    D_MODEL,
    D_VOCAB,
    N_CTX,
    N_HEADS,
    randomize,
)
from hub_cache import HubCache
from safetensors.torch import save_file
from transformer_lens import HookedTransformer, HookedTransformerConfig
from transformers import AutoModelForCausalLM, PreTrainedModel

import tl_devicefix

pytestmark = pytest.mark.usefixtures("hub")  # so that nothing is fetched

# --------------------------------------------------------------------------------------------
# Files


def save_pickle(tensors: dict[str, torch.Tensor], file: Path) -> None:
    torch.save(tensors, file)


def save_pickle_as_before_torch_1_6(tensors: dict[str, torch.Tensor], file: Path) -> None:
    torch.save(tensors, file, _use_new_zipfile_serialization=False)


def save_safetensors(tensors: dict[str, torch.Tensor], file: Path) -> None:
    save_file(tensors, file, metadata={"format": "pt"})


FILES: dict[str, tuple[str, Callable[..., None], int]] = {
    "safetensors": ("model.safetensors", save_safetensors, 1),
    "sharded safetensors": ("model.safetensors", save_safetensors, 3),
    "pickle": ("pytorch_model.bin", save_pickle, 1),
    "sharded pickles": ("pytorch_model.bin", save_pickle, 3),
    "old pickle": ("pytorch_model.bin", save_pickle_as_before_torch_1_6, 1),
}
"""What a file is called, how it is written, and how many there are."""


def write_files(kind: str, hf_model: PreTrainedModel, directory: Path) -> None:
    """Write a checkpoint in one of the `FILES` layouts, with an index if there are several."""
    name, save, n_files = FILES[kind]
    hf_model.config.save_pretrained(directory)
    tensors = {
        name: tensor.detach().clone()
        for name, tensor in hf_model.state_dict().items()
        if not (name == "lm_head.weight" and hf_model.config.tie_word_embeddings)
    }
    if n_files == 1:
        save(tensors, directory / name)
        return
    stem, suffix = name.split(".")
    names = sorted(tensors)
    weight_map = {}
    for i in range(n_files):
        file = f"{stem}-{i + 1:05}-of-{n_files:05}.{suffix}"
        here = names[i::n_files]
        save({tensor: tensors[tensor] for tensor in here}, directory / file)
        weight_map |= dict.fromkeys(here, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / f"{name}.index.json").write_text(json.dumps(index))


@pytest.mark.cover
@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("name", ["gpt2", "qwen2"])
def test_every_kind_of_file_holds_the_same_model(
    name: str,
    kind: str,
    hf_models: Any,
    references: Any,
    machine: Any,
    tokens: torch.Tensor,
    tmp_path: Path,
) -> None:
    write_files(kind, hf_models(name), tmp_path)

    model = HookedTransformer.from_pretrained(tmp_path, n_devices=3)

    assert_same_model(model, references(name), tokens)


def test_safetensors_are_read_where_there_are_pickles_too(
    hf_models: Any, references: Any, machine: Any, tmp_path: Path
) -> None:
    write_files("safetensors", hf_models("qwen2"), tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")  # cut short, if it were read

    model = HookedTransformer.from_pretrained(tmp_path, n_devices=3)

    assert_same_weights(model, references("qwen2"))


# --------------------------------------------------------------------------------------------
# Dtypes

FORMS = ("hf_model", "checkpoint")


COMPUTED = ("gpt2", "pythia", "mixtral", "gemma", "gemma-2", "gemma-3")
"""Architectures whose converters compute; two others move."""
OTHERS = pytest.mark.full("its converter moves weights, as those of others that run by default")


@pytest.mark.cover
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[] if name in COMPUTED else [OTHERS],
        )
        for name in ALL_ARCHITECTURES
    ],
)
def test_bfloat16_weights_loaded_in_float32_lose_nothing(
    name: str,
    form: str,
    hf_models: Any,
    tokenizer: Any,
    checkpoints: Any,
    references: Any,
    machine: Any,
    tokens: torch.Tensor,
) -> None:
    """Whatever converters compute (Gemma's scaled embedding, its norms plus one) is in float32."""
    references(name)  # skips what the installed TransformerLens cannot convert
    in_float32 = hf_models(name, torch.bfloat16, torch.float32)
    architecture = ALL_ARCHITECTURES[name]
    with tl_devicefix.disabled():
        reference = load_hooked(architecture, copy.deepcopy(in_float32), tokenizer, device="cpu")

    if form == "checkpoint":
        model = HookedTransformer.from_pretrained(checkpoints(name, torch.bfloat16), n_devices=3)
    else:
        model = load_hooked(architecture, hf_models(name, torch.bfloat16), tokenizer, n_devices=3)

    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert_same_model(model, reference, tokens)


STORED = (torch.float32, torch.bfloat16)
LOADED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.mark.cover(("stored", "loaded"))
@pytest.mark.parametrize(
    ("stored", "loaded"), list(itertools.product(STORED, LOADED)), ids=lambda dtype: str(dtype)[6:]
)
@pytest.mark.parametrize("name", ["gpt2", "qwen2", "gemma-2"])
def test_any_dtype_is_loaded_in_any_other(
    name: str,
    stored: torch.dtype,
    loaded: torch.dtype,
    hf_models: Any,
    tokenizer: Any,
    checkpoints: Any,
    references: Any,
    machine: Any,
) -> None:
    references(name)
    exact = load_hooked(
        ALL_ARCHITECTURES[name],
        hf_models(name, stored, torch.float64),
        tokenizer,
        dtype=torch.float64,
        device="cpu",
    )

    model = HookedTransformer.from_pretrained(checkpoints(name, stored), dtype=loaded, n_devices=3)

    last_place = torch.finfo(loaded).eps
    expected = dict(exact.named_parameters())
    for key, parameter in model.named_parameters():
        assert parameter.dtype == loaded, key
        torch.testing.assert_close(
            parameter.double().cpu(), expected[key], rtol=last_place, atol=10 * last_place
        )


# --------------------------------------------------------------------------------------------
# Embeddings


@pytest.mark.parametrize("options", [{}, NO_PROCESSING], ids=["processed", "not processed"])
@pytest.mark.parametrize("name", ["gpt2", "qwen2", "gemma-2"])
def test_tied_embeddings_become_two_matrices(
    name: str, options: dict[str, bool], references: Any, machine: Any, tmp_path: Path
) -> None:
    references(name)
    config = ALL_ARCHITECTURES[name].hf_config()
    config.tie_word_embeddings = True
    hf_model = AutoModelForCausalLM.from_config(config)
    randomize(hf_model)
    assert hf_model.lm_head.weight is hf_model.get_input_embeddings().weight
    hf_model.save_pretrained(tmp_path)

    model = HookedTransformer.from_pretrained(tmp_path, n_devices=3, **options)

    W_E, W_U = model.embed.W_E.detach(), model.unembed.W_U.detach()
    assert W_E.untyped_storage().data_ptr() != W_U.untyped_storage().data_ptr()
    before = W_U.clone()
    W_E.zero_()
    assert torch.equal(W_U, before)
    if options is NO_PROCESSING:
        torch.testing.assert_close(W_U.cpu(), hf_model.lm_head.weight.detach().T, rtol=0, atol=0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["gpt2", "qwen2", "pythia", "gemma-2"])
def test_a_padded_vocabulary(
    name: str,
    form: str,
    hf_models: Any,
    tokenizer: Any,
    references: Any,
    machine: Any,
    tokens: torch.Tensor,
    tmp_path: Path,
) -> None:
    if name == "gemma-2" and form == "hf_model":
        pytest.skip("the tests say what TransformerLens knows of it by name: also its vocabulary")
    references(name)  # skips where TransformerLens itself cannot read it
    hf_model = copy.deepcopy(hf_models(name))
    hf_model.resize_token_embeddings(D_VOCAB + 1, pad_to_multiple_of=8)

    if form == "checkpoint":
        hf_model.save_pretrained(tmp_path)
        model = HookedTransformer.from_pretrained(tmp_path, n_devices=3)
    else:
        model = load_hooked(ALL_ARCHITECTURES[name], hf_model, tokenizer, n_devices=3)

    assert model.cfg.d_vocab == model.cfg.d_vocab_out == model(tokens).shape[-1] == D_VOCAB + 8
    of_real_tokens = model(tokens)[..., :D_VOCAB].detach().cpu().log_softmax(dim=-1)
    torch.testing.assert_close(
        of_real_tokens, log_probs(references(name), tokens), rtol=1e-5, atol=1e-5
    )


# --------------------------------------------------------------------------------------------
# TransformerLens's own small models

SIZES = {
    "d_model": D_MODEL,
    "n_layers": 3,
    "d_mlp": D_MLP,
    "d_head": D_MODEL // N_HEADS,
    "n_heads": N_HEADS,
    "n_ctx": N_CTX,
    "d_vocab": D_VOCAB,
}
OWN: dict[str, dict[str, Any]] = {
    "NeelNanda/SoLU_3L512W_C4_Code": {"act_fn": "solu_ln", "normalization": "LN"},
    "NeelNanda/GELU_3L512W_C4_Code": {"act_fn": "gelu", "normalization": "LN"},
    "NeelNanda/Attn_Only_3L512W_C4_Code": {"attn_only": True, "normalization": "LN"},
    "NeelNanda/Attn-Only-2L512W-Shortformer-6B-big-lr": {
        "attn_only": True,
        "shortformer_pos": True,
        "normalization": None,
    },
    "NeelNanda/SoLU_4L512W_C4_Code": {
        "act_fn": "solu_ln",
        "normalization": "LN",
        "final_rms": True,
    },
    "NeelNanda/SoLU_8L_v21_old": {"act_fn": "solu_ln", "normalization_type": "LN"},
    "ArthurConmy/redwood_attn_2l": {
        "attn_only": True,
        "shortformer_pos": True,
        "normalization_type": "LN",
    },
}
"""Names, and what the config.json there says beside `SIZES`."""

FETCHED = (
    "model_final.pth",
    "checkpoints/model_1000000000.pth",
    "checkpoints/model_2000000000.pth",
)


class OwnModels:
    """What TransformerLens fetches from the repositories of its own models."""

    def __init__(self) -> None:
        self.fetched: list[tuple[str, str, dict[str, Any]]] = []

    def list_repo_files(self, name: str, **_: Any) -> list[str]:
        return ["config.json", *FETCHED]

    def download_file_from_hf(self, name: str, file: str, **options: Any) -> Any:
        self.fetched.append((name, file, options))
        config = {"act_fn": "gelu", "attn_only": False, **SIZES, **OWN[name]}
        return config if file == "config.json" else weights_of(name, config, FETCHED.index(file))


def weights_of(name: str, config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Random weights, as TransformerLens's own models are stored."""
    stored = {"shortformer_pos", "normalization", "normalization_type", "tokenizer_name"}
    shape = {key: value for key, value in config.items() if key not in stored}
    norm = config.get("normalization", config.get("normalization_type"))
    cfg = HookedTransformerConfig(**shape, normalization_type=norm, device="cpu")
    model = HookedTransformer(cfg)
    randomize(model)
    weights = {
        key: tensor * (1 + seed / 8)
        for key, tensor in model.state_dict().items()
        if not key.endswith(("mask", "IGNORE"))
    }
    if config.get("final_rms"):  # which has no bias: one that is stored is not folded
        weights["ln_final.b"] = torch.randn(cfg.d_model)
    if "_old" in name:  # their norms had another name, and W_pos lay on its side
        weights = {key.replace("ln", "norm"): tensor for key, tensor in weights.items()}
        weights = {key.replace("norm_final", "norm"): tensor for key, tensor in weights.items()}
        for key in weights:
            if key == "pos_embed.W_pos" or ".W_" in key:
                weights[key] = weights[key].transpose(-2, -1)
    return weights


@pytest.fixture
def own_models(monkeypatch: pytest.MonkeyPatch) -> OwnModels:
    models = OwnModels()
    monkeypatch.setattr(tl_loading, "HfApi", lambda: models)
    monkeypatch.setattr(tl_loading.utils, "download_file_from_hf", models.download_file_from_hf)
    return models


@pytest.mark.fails_unpatched
@pytest.mark.parametrize("n_devices", [3])
@pytest.mark.parametrize("name", OWN)
def test_transformer_lens_s_own_models(
    name: str, n_devices: int, own_models: OwnModels, machine: Any, tokens: torch.Tensor
) -> None:
    with tl_devicefix.disabled():
        reference = HookedTransformer.from_pretrained(name, device="cpu")

    model = HookedTransformer.from_pretrained(name, n_devices=n_devices)

    assert len(model.placement.devices) == n_devices
    assert_same_model(model, reference, tokens)


def test_a_training_checkpoint_of_transformer_lens_s_own_models(
    own_models: OwnModels, machine: Any, tokens: torch.Tensor
) -> None:
    name = "NeelNanda/GELU_3L512W_C4_Code"
    with tl_devicefix.disabled():
        reference = HookedTransformer.from_pretrained(name, checkpoint_index=1, device="cpu")

    model = HookedTransformer.from_pretrained(name, checkpoint_index=1, n_devices=3)

    assert own_models.fetched[-1][:2] == (name, FETCHED[2])
    assert_same_model(model, reference, tokens)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_transformer_lens_s_own_models_are_rounded_once(
    dtype: torch.dtype, own_models: OwnModels, machine: Any
) -> None:
    name = "NeelNanda/SoLU_3L512W_C4_Code"
    exact = HookedTransformer.from_pretrained(name, dtype=torch.float64, device="cpu")

    model = HookedTransformer.from_pretrained(name, dtype=dtype, n_devices=3)

    for (key, parameter), expected in zip(model.named_parameters(), exact.parameters()):
        assert parameter.dtype == dtype
        same = parameter.cpu() == expected.to(dtype)
        assert same.double().mean() > 0.99, key


@pytest.mark.fails_unpatched
def test_a_revision_is_the_model_s_and_not_that_of_a_tokenizer_of_another_repository(
    own_models: OwnModels,
    hf_models: Any,
    tokenizer: Any,
    machine: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, how = "NeelNanda/GELU_3L512W_C4_Code", {"cache_dir": tmp_path, "revision": "v2"}
    monkeypatch.setitem(OWN, name, {**OWN[name], "tokenizer_name": "someone/tokenizer"})
    HubCache(tmp_path).add("someone/tokenizer", hf_models("gpt2"), tokenizer)  # only "main"

    model = HookedTransformer.from_pretrained(name, n_devices=2, **how)

    assert model.tokenizer.get_vocab() == tokenizer.get_vocab()
    for _, file, options in own_models.fetched:
        assert how.items() <= options.items(), file

"""A checkpoint directory is loaded by what is in it, whatever it is called."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import D_VOCAB, N_LAYERS
from hub_cache import HubCache
from transformer_lens import HookedTransformer
from transformers import AutoTokenizer, dynamic_module_utils

from tl_devicefix import plan

HOW: dict[str, Callable[[Path], Any]] = {
    "path": lambda directory: directory,
    "string": str,
    "trailing slash": lambda directory: f"{directory}/",
    "relative": lambda directory: directory.name,
    "relative with a dot": lambda directory: f"./{directory.name}",
}
NAMES = [
    "llama-2-7b",
    "gemma-2-2b",
    "bert-like",
    "t5-ish",
    "with spaces",
    "gpt2",
    "NeelNanda-of-mine",
    "stanford-crfm",
    "mistral.v0.1",
]


@pytest.fixture
def directory(tmp_path: Path, checkpoints: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`directory("bert-like")`: the tiny Qwen2, in the current directory, under this name."""
    monkeypatch.chdir(tmp_path)
    return lambda name: Path(shutil.copytree(checkpoints("qwen2"), tmp_path / name))


def assert_is_the_tiny_qwen2(model: HookedTransformer, hf_models: Any) -> None:
    assert model.cfg.original_architecture == "Qwen2ForCausalLM"
    assert model.cfg.n_layers == N_LAYERS
    embedding = hf_models("qwen2").get_input_embeddings().weight
    assert torch.equal(model.W_E.detach().cpu(), embedding.detach())


@pytest.mark.parametrize("name", NAMES)
def test_any_name_will_do(name: str, directory: Any, hf_models: Any, machine: Any) -> None:
    path = directory(name)
    for given in ("string", "relative"):
        model = HookedTransformer.from_pretrained(
            HOW[given](path), fold_ln=False, center_writing_weights=False, n_devices=2
        )
        assert_is_the_tiny_qwen2(model, hf_models)
        assert model.tokenizer is not None


@pytest.mark.parametrize("how", HOW)
def test_any_way_of_writing_the_path_will_do(
    how: str, directory: Any, hf_models: Any, machine: Any
) -> None:
    path = directory("a model")
    model = HookedTransformer.from_pretrained(
        HOW[how](path), fold_ln=False, center_writing_weights=False, n_devices=2
    )
    assert_is_the_tiny_qwen2(model, hf_models)


def test_a_directory_of_results_does_not_hide_the_model_it_is_named_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = plan("Llama-2-7b", dtype="bfloat16")
    monkeypatch.chdir(tmp_path)
    Path("Llama-2-7b").mkdir()
    (tmp_path / "Llama-2-7b" / "results.csv").touch()

    assert plan("Llama-2-7b", dtype="bfloat16") == elsewhere


def test_the_tokenizer_is_the_directory_s(directory: Any, machine: Any) -> None:
    path = directory("model")

    model = HookedTransformer.from_pretrained(path, n_devices=2)

    saved = AutoTokenizer.from_pretrained(path)
    assert Path(model.tokenizer.name_or_path) == path
    assert type(model.tokenizer) is type(saved)
    assert model.tokenizer.get_vocab() == saved.get_vocab()


def test_a_given_tokenizer_is_used_instead(directory: Any, tokenizer: Any, machine: Any) -> None:
    model = HookedTransformer.from_pretrained(directory("model"), tokenizer=tokenizer)
    assert model.tokenizer.name_or_path == tokenizer.name_or_path


def test_without_a_tokenizer_in_it_the_model_has_none(
    tmp_path: Path, hf_models: Any, tokens: torch.Tensor, machine: Any
) -> None:
    hf_models("qwen2").save_pretrained(tmp_path)

    model = HookedTransformer.from_pretrained(tmp_path, n_devices=2)

    assert model.tokenizer is None
    assert model(tokens).shape == (*tokens.shape, D_VOCAB)


@pytest.mark.parametrize("name", ["./llama", "../llama", "/llama", "~/llama"])
def test_a_path_that_is_not_there_is_not_asked_for_on_the_hub(name: str, refused: Any) -> None:
    with refused(repr(name), "no model that TransformerLens lists", "directory"):
        HookedTransformer.from_pretrained(name)


def test_a_directory_with_an_adapter_only(tmp_path: Path, refused: Any) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with refused(str(tmp_path), "PEFT adapter", "hf_model"):
        HookedTransformer.from_pretrained(str(tmp_path))


@pytest.fixture
def with_code(
    directory: Any, hf_models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A tiny Qwen3 in a directory called as models are whose code TransformerLens runs."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "modules")])
    path = directory("Qwen/Qwen3-mine")
    hf_models("qwen3").save_pretrained(path)
    (path / "own.py").write_text(f"open({str(tmp_path / 'it ran')!r}, 'w')\nclass Own: ...\n")
    for file, key, value in (
        ("config.json", "AutoConfig", "own.Own"),
        ("config.json", "AutoModelForCausalLM", "own.Own"),
        ("tokenizer_config.json", "AutoTokenizer", ["own.Own", "own.Own"]),
    ):
        fields = json.loads((path / file).read_text())
        fields.setdefault("auto_map", {})[key] = value
        (path / file).write_text(json.dumps(fields))
    return path.relative_to(tmp_path)


@pytest.mark.parametrize("how", [str, os.path.abspath], ids=["relative", "absolute"])
def test_code_in_a_directory_does_not_run_whatever_it_is_called(
    how: Callable[[Path], str], with_code: Path, hf_models: Any, machine: Any, tmp_path: Path
) -> None:
    model = HookedTransformer.from_pretrained(how(with_code), n_devices=2, fold_ln=False)
    assert not model.cfg.trust_remote_code
    assert not (tmp_path / "it ran").exists()
    with contextlib.suppress(Exception):  # what it holds is no model
        HookedTransformer.from_pretrained(how(with_code), trust_remote_code=True)
    assert (tmp_path / "it ran").exists()


def test_nor_does_that_of_a_name_that_transformer_lens_does_not_list(
    with_code: Path, hub: HubCache, hf_models: Any, machine: Any, tmp_path: Path
) -> None:
    there = hub.add("Qwen/Qwen3-tuned", hf_models("qwen3"))
    shutil.copytree(with_code, there, dirs_exist_ok=True)
    model = HookedTransformer.from_pretrained("Qwen/Qwen3-tuned", n_devices=2)
    assert model.tokenizer is not None
    assert not (tmp_path / "it ran").exists()

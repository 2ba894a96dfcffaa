"""A checkpoint without tokenizer files: said when it is loaded, and again at the first text."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tl_devicefix
from tl_devicefix.monkeypatch.versions import has_hooked_transformer

if not has_hooked_transformer():
    pytest.skip("this TransformerLens has no HookedTransformer", allow_module_level=True)

from transformer_lens import HookedTransformer


@pytest.fixture(params=["one device", "two devices"])
def model(request: Any, tmp_path: Path, hf_models: Any, caplog: Any) -> Iterator[HookedTransformer]:
    hf_models("qwen2").save_pretrained(tmp_path)
    with tl_devicefix.simulate(2), caplog.at_level(logging.WARNING):
        n_devices = 2 if request.param == "two devices" else 1
        yield HookedTransformer.from_pretrained(tmp_path, n_devices=n_devices)


def test_loading_says_so(model: Any, tmp_path: Path, request: Any, caplog: Any) -> None:
    (said,) = [r for r in caplog.get_records("setup") if "has no tokenizer" in r.getMessage()]
    assert said.levelno == logging.WARNING
    assert said.name == "tl_devicefix"
    text = said.getMessage()
    assert repr(str(tmp_path)) in text
    assert "tokenizer.json" in text
    assert "tokenizer=" in text
    assert "set_tokenizer" in text


TEXTS = {
    "forward": lambda model: model("w3 w4"),
    "a batch": lambda model: model(["w3", "w4"]),
    "run_with_cache": lambda model: model.run_with_cache("w3"),
    "generate": lambda model: model.generate("w3", max_new_tokens=1),
    "to_tokens": lambda model: model.to_tokens("w3"),
    "to_str_tokens": lambda model: model.to_str_tokens("w3"),
    "to_single_token": lambda model: model.to_single_token("w3"),
    "to_string": lambda model: model.to_string(torch.tensor([3])),
}


@pytest.mark.parametrize("text", TEXTS)
def test_text_is_refused_with_what_to_do(model: Any, text: str) -> None:
    with pytest.raises(AssertionError, match="this model has no tokenizer") as refused:
        TEXTS[text](model)
    assert "set_tokenizer" in str(refused.value)
    assert str(refused.value).count("this model has no tokenizer") == 1
    with tl_devicefix.disabled(), pytest.raises(AssertionError) as theirs:
        TEXTS[text](model)
    assert str(refused.value).startswith(str(theirs.value))  # what TransformerLens says comes first


def test_the_remedy_works(model: Any, tokenizer: Any) -> None:
    model.set_tokenizer(tokenizer)
    assert model("w3 w4").shape == (1, 2, model.cfg.d_vocab_out)


def test_with_a_tokenizer_nothing_is_said(
    tmp_path: Path, hf_models: Any, tokenizer: Any, caplog: Any
) -> None:
    hf_models("qwen2").save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING):
        model = HookedTransformer.from_pretrained(tmp_path, tokenizer=tokenizer, device="cpu")
    assert "no tokenizer" not in caplog.text
    with pytest.raises(AssertionError) as error:  # of something else
        model.to_single_token("w3 w4 w5")
    assert "this model has no tokenizer" not in str(error.value)

"""An `hf_model` of another architecture than the name's: one sentence that names both."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tl_devicefix.monkeypatch.versions import has_hooked_transformer

if not has_hooked_transformer():
    pytest.skip("this TransformerLens has no HookedTransformer", allow_module_level=True)

import transformer_lens.loading_from_pretrained as tl_loading
from architectures import ALL_ARCHITECTURES, load_hooked


@pytest.mark.parametrize(
    ("named", "given", "reason"),
    [
        ("qwen2", "llama", "a weight of a Qwen2ForCausalLM is missing"),
        ("qwen2", "gpt2", "'GPT2LMHeadModel' object has no attribute 'model'"),
        ("gpt2", "llama", "'LlamaForCausalLM' object has no attribute 'transformer'"),
    ],
)
def test_both_architectures_are_named(
    hf_models: Any, tokenizer: Any, named: str, given: str, reason: str
) -> None:
    model = hf_models(given)
    names = [type(hf_models(name_of_model)).__name__ for name_of_model in (given, named)]
    sentence = f"hf_model is a {names[0]}, but the name belongs to a {names[1]} "
    remedy = "; pass the model of that name, as AutoModelForCausalLM loads it"
    with pytest.raises(ValueError, match=re.escape(f"{sentence}({reason}){remedy}")):
        load_hooked(ALL_ARCHITECTURES[named], model, tokenizer, device="cpu")


def test_no_room_is_no_wrong_architecture(
    hf_models: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("there is no room")

    monkeypatch.setattr(tl_loading, "get_pretrained_state_dict", no_room)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        load_hooked(ALL_ARCHITECTURES["qwen2"], hf_models("llama"), tokenizer, device="cpu")

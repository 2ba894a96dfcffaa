"""Models to compare with: toys, and what a name or a config is loaded as."""

from __future__ import annotations

import copy

import pytest
from hf_models import D_VOCAB, make_hf_model, save_checkpoint
from transformers import LlamaConfig

from tl_devicefix.monkeypatch.versions import has_hooked_transformer


@pytest.fixture
def loaded(hf_models, request):
    """`loaded("llama", 3)`: a model over so many devices, and its config.

    A HookedTransformer, or with TransformerLens 4 a Bridge, as a name is before loading.
    """
    if not has_hooked_transformer():
        boot = request.getfixturevalue("boot")
        return lambda name, n: (boot(name, n_devices=n), hf_models(name).config)
    from_pretrained = request.getfixturevalue("from_pretrained")

    def load(name, n_devices):
        model = from_pretrained(name, n_devices=n_devices)
        return model, copy.deepcopy(model.cfg)

    return load


@pytest.fixture(scope="module")
def long_llama(tokenizer, tmp_path_factory):
    """A checkpoint of a narrow Llama that reads long texts."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    config = LlamaConfig(**sizes, **heads, vocab_size=D_VOCAB, max_position_embeddings=2048)
    return str(save_checkpoint(make_hf_model(config), tokenizer, tmp_path_factory.mktemp("llama")))

"""Models to compare with: toys, and what a name or a config is loaded as."""

from __future__ import annotations

import copy

import pytest
from hf_models import D_VOCAB, make_hf_model, save_checkpoint
from model_classes import CLASSES, HOOKED
from transformers import LlamaConfig


@pytest.fixture
def model_class():
    """HookedTransformer, or with TransformerLens 4 a Bridge, as a name is before loading."""
    return CLASSES[0]


@pytest.fixture
def loaded(load, hf_models):
    """`loaded("llama", 3)`: a model over so many devices, and its config before loading."""

    def get(name, n_devices):
        model = load(name, n_devices=n_devices)
        return model, copy.deepcopy(model.cfg) if HOOKED in CLASSES else hf_models(name).config

    return get


@pytest.fixture(scope="module")
def long_llama(tokenizer, tmp_path_factory):
    """A checkpoint of a narrow Llama that reads long texts."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    config = LlamaConfig(**sizes, **heads, vocab_size=D_VOCAB, max_position_embeddings=2048)
    return str(save_checkpoint(make_hf_model(config), tokenizer, tmp_path_factory.mktemp("llama")))

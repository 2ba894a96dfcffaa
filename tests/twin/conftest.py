"""In this folder, each load is checked on a tiny model of the same config, as for users."""

import pytest
import torch
import transformers
from hf_models import HF_CONFIGS, make_hf_model, save_checkpoint


@pytest.fixture(autouse=True)
def numbers_as_users_have_them(monkeypatch):
    monkeypatch.delenv("TL_DEVICEFIX_ON_MISMATCH")


@pytest.fixture
def save(tokenizer, tmp_path):
    """`save("llama", attention_bias=True)`: a directory, and transformers' model of it."""

    def save(name, **settings):
        config = HF_CONFIGS[name]()
        model = make_hf_model(type(config)(**{**config.to_dict(), **settings}))
        path = str(save_checkpoint(model, tokenizer, tmp_path))
        # Loaded again, because transformers moves some settings of a config when it reads it.
        read = transformers.AutoModelForCausalLM.from_pretrained(
            path, attn_implementation="eager", dtype=torch.float32
        )
        return path, read.eval()

    return save

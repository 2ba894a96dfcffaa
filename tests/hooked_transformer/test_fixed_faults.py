"""Faults of TransformerLens's own methods are fixed: transformers' numbers come out."""

import json

import pytest
import torch
import transformers
from comparison import assert_agrees, log_probs
from hf_models import D_VOCAB, GROUPED, make_hf_model
from model_classes import HookedTransformer
from packaging.version import Version
from transformer_lens.loading_from_pretrained import OFFICIAL_MODEL_NAMES

from tl_devicefix.checkpoints.hub import as_saved

pytestmark = pytest.mark.hooked

TOKENS = torch.randint(3, D_VOCAB, (2, 24), generator=torch.Generator().manual_seed(0))


def test_config_saved_by_transformers_5_keeps_its_rotary_base(tmp_path):
    def as_transformers_5_saves(fields):
        fields.pop("rope_theta", None)
        return {**fields, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}

    config = transformers.Qwen2Config(**GROUPED, rope_theta=1e6)
    _assert_right(config, tmp_path, as_transformers_5_saves)


@pytest.mark.skipif(
    "swiss-ai/Apertus-8B-2509" not in OFFICIAL_MODEL_NAMES,
    reason="this TransformerLens has no Apertus",
)
def test_apertus_has_norms_that_its_config_does_not_name(tmp_path):
    _assert_right(transformers.ApertusConfig(**GROUPED), tmp_path)


@pytest.mark.skipif(
    Version(transformers.__version__) >= Version("5"),
    reason="transformers 5 reads rope_parameters itself",
)
def test_rope_parameters_go_where_transformers_4_looks():
    linear = {"rope_type": "linear", "factor": 8.0}
    config = transformers.Gemma3TextConfig()
    config.rope_parameters = {
        "full_attention": {**linear, "rope_theta": 5.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 6.0},
    }
    as_saved(config)
    assert (config.rope_theta, config.rope_local_base_freq) == (5.0, 6.0)
    assert config.rope_scaling == linear


def test_texts_of_unequal_length_generate_as_each_alone(checkpoints):
    model = HookedTransformer.from_pretrained(checkpoints("llama"), device="cpu")
    options = {"max_new_tokens": 6, "do_sample": False, "stop_at_eos": False, "verbose": False}
    texts = ["w7 w8 w9 w10", "w11", "w14 w15"]
    assert model.generate(texts, padding_side="left", **options) == [
        model.generate(text, **options) for text in texts
    ]


def _assert_right(config, directory, edit=dict):
    """A HookedTransformer of a checkpoint, whose config.json is edited, equals transformers."""
    hf_model = make_hf_model(config, torch.float32)
    hf_model.save_pretrained(directory)
    file = directory / "config.json"
    file.write_text(json.dumps(edit(json.loads(file.read_text()))))
    model = HookedTransformer.from_pretrained(directory, device="cpu")
    assert_agrees(log_probs(model, TOKENS), hf_model(TOKENS).logits.log_softmax(-1), tolerance=1e-4)

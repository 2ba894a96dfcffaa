"""Models plan by name without the network, with the sizes that their config.json on the hub says.

TransformerLens has the sizes of Llamas and Gemmas written down; of the others it asks the hub.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import transformer_lens.loading_from_pretrained as tl_loading
from hub_cache import HubCache
from transformer_lens import HookedTransformer
from transformers import CONFIG_MAPPING

from tl_devicefix import plan, simulate
from tl_devicefix.checkpoints.configs import known_config, known_fields
from tl_devicefix.hooked_transformer.config import model_config
from tl_devicefix.simulation.machine import Machine

ASKED_OF_THE_HUB = (
    "EleutherAI/", "facebook/opt-", "gpt2", "distilgpt2", "microsoft/", "mistralai/", "Qwen/",
)  # fmt: skip
"""Families whose sizes are known here; none is left out."""

BILLIONS = """
distilgpt2 0.0819, gpt2 0.124, gpt2-medium 0.355, gpt2-large 0.774, gpt2-xl 1.558,
EleutherAI/ gpt-neo-125M 0.1252, gpt-neo-1.3B 1.316, gpt-neo-2.7B 2.651, gpt-j-6B 6.051,
gpt-neox-20b 20.55, pythia-14m 0.01407, pythia-31m 0.03049, pythia-70m 0.07043, pythia-160m 0.1623,
pythia-410m 0.4053, pythia-1b 1.012, pythia-1.4b 1.415, pythia-2.8b 2.775, pythia-6.9b 6.857,
pythia-12b 11.85,
facebook/ opt-125m 0.1252, opt-1.3b 1.316, opt-2.7b 2.652, opt-6.7b 6.658, opt-13b 12.85,
opt-30b 29.97, opt-66b 65.72,
microsoft/ phi-1 1.418, phi-1_5 1.418, phi-2 2.780, Phi-3-mini-4k-instruct 3.821, phi-4 14.66,
mistralai/ Mistral-7B-v0.1 7.242, Mistral-7B-Instruct-v0.1 7.242, Mistral-Nemo-Base-2407 12.25,
Mistral-Small-24B-Base-2501 23.57, Mixtral-8x7B-v0.1 46.70, Mixtral-8x7B-Instruct-v0.1 46.70,
meta-llama/ Llama-2-7b-hf 6.738, Llama-2-13b-hf 13.02, Llama-2-7b-chat-hf 6.738,
Llama-2-13b-chat-hf 13.02, Llama-2-70b-hf 68.98, Llama-2-70b-chat-hf 68.98, Meta-Llama-3-8B 8.030,
Meta-Llama-3-70B 70.55, Llama-3.1-8B 8.030, Llama-3.1-70B 70.55, Llama-3.1-405B 405.9,
Llama-3.2-1B 1.236, Llama-3.2-3B 3.213,
google/ gemma-2b 2.506, gemma-7b 8.538, gemma-2-2b 2.614, gemma-2-9b 9.242, gemma-2-27b 27.23,
Qwen/ Qwen-1_8B 1.837, Qwen-7B 7.721, Qwen-14B 14.17, Qwen1.5-0.5B 0.464, Qwen1.5-1.8B 1.837,
Qwen1.5-4B 3.950, Qwen1.5-7B 7.721, Qwen1.5-14B 14.17, Qwen2-0.5B 0.494, Qwen2-1.5B 1.544,
Qwen2-7B 7.616, Qwen2.5-0.5B 0.494, Qwen2.5-1.5B 1.544, Qwen2.5-3B 3.086, Qwen2.5-7B 7.616,
Qwen2.5-14B 14.77, Qwen2.5-32B 32.76, Qwen2.5-72B 72.71, QwQ-32B-Preview 32.76, Qwen3-0.6B 0.596,
Qwen3-1.7B 1.721, Qwen3-4B 4.022, Qwen3-8B 8.191, Qwen3-14B 14.77
"""
"""The published numbers of parameters, a tied embedding counted once, by organisation."""


def published(name: str) -> float:
    """The number of parameters; a model trained on from another one, or again, has as many."""
    name = re.sub(r"(-deduped|-v0|-seed\d|-Chat|-Instruct|-it|-Base)+$", "", name)
    organisation = ""
    for entry in BILLIONS.split(","):
        *prefix, model, billions = entry.split()
        organisation = prefix[0] if prefix else organisation
        if organisation + model == name:
            return 1e9 * float(billions)
    raise LookupError(name)


ONE_OF_EACH_SIZE = {str(fields): name for name, fields in reversed(known_fields().items())}.values()
NOT_LISTED = ("meta-llama/Llama-2-70b-hf", "meta-llama/Llama-3.1-405B")
"""Models that are known here and that no TransformerLens lists."""


def needs(name: str) -> None:
    if name not in (*tl_loading.OFFICIAL_MODEL_NAMES, *NOT_LISTED):
        pytest.skip(f"the installed TransformerLens does not list {name}")


def test_every_model_of_a_known_family_is_known() -> None:
    listed = {name for name in tl_loading.OFFICIAL_MODEL_NAMES if name.startswith(ASKED_OF_THE_HUB)}
    assert listed - known_fields().keys() == set()


@pytest.mark.parametrize("name", ONE_OF_EACH_SIZE)
def test_a_plan_weighs_the_published_number_of_parameters(name: str) -> None:
    """K and V of grouped-query attention stay grouped.

    There is an unembedding matrix even if it is tied, and every bias, if only zeros: for these at
    most 0.2% more.
    """
    needs(name)
    cfg = model_config(name, prefer_known=True, dtype=torch.float32)

    with simulate(4, "1TiB"):
        placement = plan(cfg, n_devices=4)

    count = sum(component.weights for component in placement.components) / 4
    if known_config(name).tie_word_embeddings:
        count -= cfg.d_vocab * cfg.d_model
    assert count == pytest.approx(published(name), rel=0.01)


@pytest.mark.parametrize(
    "name",
    {
        fields["model_type"]: name
        for name, fields in known_fields().items()
        # Qwen 1 comes with code of its own, without which transformers reads no config.json of it.
        if fields["model_type"] in CONFIG_MAPPING and name not in NOT_LISTED
    }.values(),
)
def test_a_known_config_is_what_transformer_lens_makes_of_the_fetched_one(
    name: str, hub: HubCache
) -> None:
    needs(name)
    unread = {"torch_dtype": "float16", "transformers_version": "4.40.0", "use_cache": True}
    hub.add_config(name, {**known_fields()[name], **unread})
    assert model_config(name, prefer_known=True).to_dict() == model_config(name).to_dict()


def test_a_checkpoint_that_is_loaded_has_its_own_sizes(
    machine: Machine, hub: HubCache, hf_models: Any, tokenizer: Any
) -> None:
    hub.add("gpt2", hf_models("gpt2"), tokenizer)
    model = HookedTransformer.from_pretrained("gpt2", n_devices=2)
    assert model.cfg.d_model == hf_models("gpt2").config.n_embd
    assert model_config("gpt2", prefer_known=True).d_model == 768


@pytest.mark.parametrize("use", [plan, HookedTransformer.from_pretrained])
def test_an_unknown_config_must_be_fetched_or_handed_over(use: Any, refused: Any) -> None:
    name = "bigscience/bloom-560m"  # which TransformerLens lists and asks the hub for
    with refused(repr(name), "cannot be fetched: check the connection, or give a local directory"):
        use(name, n_devices=2)

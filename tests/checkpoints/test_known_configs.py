"""Models plan by name without the network, with the sizes that their config.json on the hub says.

TransformerLens has the sizes of Llamas and Gemmas written down; of the others it asks the hub.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import transformer_lens.loading_from_pretrained as tl_loading
from hub_cache import HubCache
from transformer_lens import HookedTransformer
from transformers import CONFIG_MAPPING

from tl_devicefix import Placement, plan, simulate
from tl_devicefix.checkpoints.configs import known_config, known_fields
from tl_devicefix.hooked_transformer.config import model_config
from tl_devicefix.simulation.machine import Machine

WRITTEN_DOWN = ("llama-", "meta-llama/", "codellama/", "google/gemma", "google/medgemma")
"""Families whose sizes TransformerLens itself has."""

ASKED_OF_THE_HUB = (
    "EleutherAI/", "facebook/opt-", "gpt2", "distilgpt2", "microsoft/", "mistralai/", "Qwen/",
)  # fmt: skip
"""Families whose sizes are known here; none is left out."""

LISTED = [
    name
    for name in tl_loading.OFFICIAL_MODEL_NAMES
    if name.startswith((*WRITTEN_DOWN, *ASKED_OF_THE_HUB))
]

SAME_SIZES = pytest.mark.full("it has the sizes of another that runs by default")


def once_for_each_size(names: Iterable[str]) -> list[Any]:
    """The names; by default one of those that have the same known config."""
    seen: set[str] = set()
    marked = []
    for name in names:
        sizes = str(known_fields().get(name, name))
        marked.append(pytest.param(name, marks=SAME_SIZES if sizes in seen else ()))
        seen.add(sizes)
    return marked


UNKNOWN = "bigscience/bloom-560m"
"""A model that TransformerLens lists and asks the hub for, and that is not known here."""

BILLIONS = {
    "distilgpt2": 0.0819, "gpt2": 0.124, "gpt2-medium": 0.355, "gpt2-large": 0.774,
    "gpt2-xl": 1.558,
    "EleutherAI/gpt-neo-125M": 0.1252, "EleutherAI/gpt-neo-1.3B": 1.316,
    "EleutherAI/gpt-neo-2.7B": 2.651, "EleutherAI/gpt-j-6B": 6.051,
    "EleutherAI/gpt-neox-20b": 20.55,
    "EleutherAI/pythia-14m": 0.01407, "EleutherAI/pythia-31m": 0.03049,
    "EleutherAI/pythia-70m": 0.07043, "EleutherAI/pythia-160m": 0.1623,
    "EleutherAI/pythia-410m": 0.4053, "EleutherAI/pythia-1b": 1.012,
    "EleutherAI/pythia-1.4b": 1.415, "EleutherAI/pythia-2.8b": 2.775,
    "EleutherAI/pythia-6.9b": 6.857, "EleutherAI/pythia-12b": 11.85,
    "facebook/opt-125m": 0.1252, "facebook/opt-1.3b": 1.316, "facebook/opt-2.7b": 2.652,
    "facebook/opt-6.7b": 6.658, "facebook/opt-13b": 12.85, "facebook/opt-30b": 29.97,
    "facebook/opt-66b": 65.72,
    "microsoft/phi-1": 1.418, "microsoft/phi-1_5": 1.418, "microsoft/phi-2": 2.780,
    "microsoft/Phi-3-mini-4k-instruct": 3.821, "microsoft/phi-4": 14.66,
    "mistralai/Mistral-7B-v0.1": 7.242, "mistralai/Mistral-7B-Instruct-v0.1": 7.242,
    "mistralai/Mistral-Nemo-Base-2407": 12.25, "mistralai/Mistral-Small-24B-Base-2501": 23.57,
    "mistralai/Mixtral-8x7B-v0.1": 46.70, "mistralai/Mixtral-8x7B-Instruct-v0.1": 46.70,
    "meta-llama/Llama-2-7b-hf": 6.738, "meta-llama/Llama-2-13b-hf": 13.02,
    "meta-llama/Llama-2-7b-chat-hf": 6.738, "meta-llama/Llama-2-13b-chat-hf": 13.02,
    "meta-llama/Llama-2-70b-hf": 68.98, "meta-llama/Llama-2-70b-chat-hf": 68.98,
    "meta-llama/Meta-Llama-3-8B": 8.030, "meta-llama/Meta-Llama-3-70B": 70.55,
    "meta-llama/Llama-3.1-8B": 8.030, "meta-llama/Llama-3.1-70B": 70.55,
    "meta-llama/Llama-3.1-405B": 405.9,
    "meta-llama/Llama-3.2-1B": 1.236, "meta-llama/Llama-3.2-3B": 3.213,
    "google/gemma-2b": 2.506, "google/gemma-7b": 8.538, "google/gemma-2-2b": 2.614,
    "google/gemma-2-9b": 9.242, "google/gemma-2-27b": 27.23,
    "Qwen/Qwen-1_8B": 1.837, "Qwen/Qwen-7B": 7.721, "Qwen/Qwen-14B": 14.17,
    "Qwen/Qwen1.5-0.5B": 0.464, "Qwen/Qwen1.5-1.8B": 1.837, "Qwen/Qwen1.5-4B": 3.950,
    "Qwen/Qwen1.5-7B": 7.721, "Qwen/Qwen1.5-14B": 14.17,
    "Qwen/Qwen2-0.5B": 0.494, "Qwen/Qwen2-1.5B": 1.544, "Qwen/Qwen2-7B": 7.616,
    "Qwen/Qwen2.5-0.5B": 0.494, "Qwen/Qwen2.5-1.5B": 1.544, "Qwen/Qwen2.5-3B": 3.086,
    "Qwen/Qwen2.5-7B": 7.616, "Qwen/Qwen2.5-14B": 14.77, "Qwen/Qwen2.5-32B": 32.76,
    "Qwen/Qwen2.5-72B": 72.71, "Qwen/QwQ-32B-Preview": 32.76,
    "Qwen/Qwen3-0.6B": 0.596, "Qwen/Qwen3-1.7B": 1.721, "Qwen/Qwen3-4B": 4.022,
    "Qwen/Qwen3-8B": 8.191, "Qwen/Qwen3-14B": 14.77,
}  # fmt: skip
"""The published numbers of parameters, a tied embedding counted once."""


def published(name: str) -> float:
    """The number of parameters; a model trained on from another one, or again, has as many."""
    return 1e9 * BILLIONS[re.sub(r"(-deduped|-v0|-seed\d|-Chat|-Instruct|-it|-Base)+$", "", name)]


NOT_LISTED = (
    "meta-llama/Llama-2-70b-hf",
    *("meta-llama/Llama-3.1-405B", "meta-llama/Llama-3.1-405B-Instruct"),
)
"""Models that are known here and that no TransformerLens lists."""


def needs(name: str) -> None:
    if name not in (*tl_loading.OFFICIAL_MODEL_NAMES, *NOT_LISTED):
        pytest.skip(f"the installed TransformerLens does not list {name}")


def parameters(placement: Placement) -> float:
    """How many parameters a plan in float32 has, as HookedTransformer holds them.

    K and V of grouped-query attention stay grouped. There is an unembedding matrix even if it is
    tied, and every bias, if only zeros: for these at most 0.2% more.
    """
    return sum(component.weights for component in placement.components) / 4


@pytest.mark.parametrize("name", once_for_each_size(LISTED))
def test_a_listed_model_plans_without_the_network(name: str, machine: Machine) -> None:
    placement = plan(name, n_devices=4, dtype="bfloat16")

    assert len(placement.devices) == 4


@pytest.mark.parametrize("name", once_for_each_size(known_fields()))
def test_a_plan_weighs_the_published_number_of_parameters(name: str) -> None:
    needs(name)
    cfg = model_config(name, prefer_known=True, dtype=torch.float32)

    with simulate(4, "1TiB"):
        count = parameters(plan(cfg, n_devices=4))

    if known_config(name).tie_word_embeddings:
        count -= cfg.d_vocab * cfg.d_model
    assert count == pytest.approx(published(name), rel=0.01)


# Qwen 1 comes with code of its own, without which transformers reads no config.json of it.
@pytest.mark.parametrize(
    "name",
    {  # one of those with the same config
        str(fields): name
        for name, fields in known_fields().items()
        if fields["model_type"] in CONFIG_MAPPING
    }.values(),
)
def test_a_known_config_is_what_transformer_lens_makes_of_the_fetched_one(
    name: str, hub: HubCache
) -> None:
    needs(name)
    fields = known_fields()[name]
    unread = {"torch_dtype": "float16", "transformers_version": "4.40.0", "use_cache": True}
    hub.add_config(name, {**fields, **unread})

    assert model_config(name, prefer_known=True).to_dict() == model_config(name).to_dict()


def test_an_alias_plans_as_the_name_it_stands_for(machine: Machine) -> None:
    assert plan("pythia-70m", n_devices=2) == plan("EleutherAI/pythia-70m", n_devices=2)


def test_the_log_tells_that_the_sizes_are_known_ones(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        plan("mistral-7b", n_devices=2)

    assert "mistralai/Mistral-7B-v0.1 are those known to tl_devicefix" in caplog.text


def test_a_checkpoint_that_is_loaded_has_its_own_sizes(
    machine: Machine, hub: HubCache, hf_models: Any, tokenizer: Any
) -> None:
    hub.add("gpt2", hf_models("gpt2"), tokenizer)

    model = HookedTransformer.from_pretrained("gpt2", n_devices=2)

    assert model.cfg.d_model == hf_models("gpt2").config.n_embd
    assert model_config("gpt2", prefer_known=True).d_model == 768


@pytest.mark.parametrize(
    "use", [plan, HookedTransformer.from_pretrained], ids=["plan", "from_pretrained"]
)
def test_an_unknown_config_must_be_fetched_or_given(use: Any, machine: Machine) -> None:
    with pytest.raises(ValueError, match="must be fetched, or be given as a local directory") as e:
        use(UNKNOWN, n_devices=2)

    assert repr(UNKNOWN) in str(e.value)
    assert "\n" not in str(e.value)

"""Models plan by name without the network, with the sizes that their config.json on the hub says.

TransformerLens has the sizes of Llamas and Gemmas written down; of the others it asks the hub.
"""

from __future__ import annotations

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

ASKED_OF_THE_HUB = (
    "EleutherAI/", "facebook/opt-", "gpt2", "distilgpt2", "microsoft/", "mistralai/", "Qwen/",
)  # fmt: skip
"""Families whose sizes are known here; none is left out."""

BILLIONS = {
    "gpt2": 0.124, "gpt2-xl": 1.558, "EleutherAI/gpt-neo-2.7B": 2.651, "EleutherAI/gpt-j-6B": 6.051,
    "EleutherAI/gpt-neox-20b": 20.55, "EleutherAI/pythia-12b": 11.85, "facebook/opt-66b": 65.72,
    "microsoft/phi-2": 2.780, "microsoft/Phi-3-mini-4k-instruct": 3.821,
    "mistralai/Mistral-7B-v0.1": 7.242, "mistralai/Mixtral-8x7B-v0.1": 46.70,
    "meta-llama/Llama-2-70b-hf": 68.98, "meta-llama/Llama-3.1-405B": 405.9,
    "meta-llama/Llama-3.2-1B": 1.236, "meta-llama/Meta-Llama-3-8B": 8.030,
    "google/gemma-7b": 8.538, "google/gemma-2-9b": 9.242, "Qwen/Qwen-14B": 14.17,
    "Qwen/Qwen1.5-4B": 3.950, "Qwen/Qwen2-7B": 7.616, "Qwen/Qwen2.5-72B": 72.71,
    "Qwen/Qwen3-14B": 14.77,
}  # fmt: skip
"""The published numbers of parameters, a tied embedding counted once."""
NOT_LISTED = ("meta-llama/Llama-2-70b-hf", "meta-llama/Llama-3.1-405B")
"""Models that are known here and that no TransformerLens lists."""


def needs(name: str) -> None:
    if name not in (*tl_loading.OFFICIAL_MODEL_NAMES, *NOT_LISTED):
        pytest.skip(f"the installed TransformerLens does not list {name}")


def test_every_model_of_a_known_family_is_known() -> None:
    listed = {name for name in tl_loading.OFFICIAL_MODEL_NAMES if name.startswith(ASKED_OF_THE_HUB)}
    assert listed - known_fields().keys() == set()


@pytest.mark.parametrize("name", BILLIONS)
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
    assert count == pytest.approx(1e9 * BILLIONS[name], rel=0.01)


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


@pytest.mark.parametrize("use", [plan, HookedTransformer.from_pretrained])
def test_an_unknown_config_must_be_fetched_or_handed_over(use: Any, refused: Any) -> None:
    name = "bigscience/bloom-560m"  # which TransformerLens lists and asks the hub for
    with refused(repr(name), "cannot be fetched: check the connection, or give a local directory"):
        use(name, n_devices=2)

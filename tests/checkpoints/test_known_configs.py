"""Models are known by name without the network, as their config.json on the hub has them.

TransformerLens has the sizes of Llamas and Gemmas written down; of the others it asks the hub.
"""

from __future__ import annotations

from typing import Any

import pytest
import transformer_lens.loading_from_pretrained as tl_loading
from hub_cache import HubCache
from transformer_lens import HookedTransformer
from transformers import CONFIG_MAPPING

from tl_devicefix import plan
from tl_devicefix.checkpoints.hub import known_fields
from tl_devicefix.hooked_transformer.config import model_config

ASKED_OF_THE_HUB = (
    "EleutherAI/", "facebook/opt-", "gpt2", "distilgpt2", "microsoft/", "mistralai/", "Qwen/",
)  # fmt: skip
"""Families whose sizes are known here; none is left out."""

NOT_LISTED = ("meta-llama/Llama-2-70b-hf", "meta-llama/Llama-3.1-405B")
"""Models that are known here and that no TransformerLens lists."""


def test_every_model_of_a_known_family_is_known() -> None:
    listed = {name for name in tl_loading.OFFICIAL_MODEL_NAMES if name.startswith(ASKED_OF_THE_HUB)}
    assert listed - known_fields().keys() == set()


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
    if name not in tl_loading.OFFICIAL_MODEL_NAMES:
        pytest.skip(f"the installed TransformerLens does not list {name}")
    unread = {"torch_dtype": "float16", "transformers_version": "4.40.0", "use_cache": True}
    hub.add_config(name, {**known_fields()[name], **unread})
    assert model_config(name, prefer_known=True).to_dict() == model_config(name).to_dict()


@pytest.mark.parametrize("use", [plan, HookedTransformer.from_pretrained])
def test_an_unknown_config_must_be_fetched_or_handed_over(use: Any, refused: Any) -> None:
    name = "bigscience/bloom-560m"  # which TransformerLens lists and asks the hub for
    with refused(repr(name), "cannot be fetched: check the connection, or give a local directory"):
        use(name, n_devices=2)

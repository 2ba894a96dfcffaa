"""Twins of the published models that are known here, on the installed TransformerLens.

A new TransformerLens or transformers is judged here, before its users are.
"""

from __future__ import annotations

import pytest
import torch
from packaging.version import Version
from transformers import CONFIG_MAPPING

from tl_devicefix.checkpoints.hub import known_config, known_fields
from tl_devicefix.monkeypatch.versions import has_bridge, has_hooked_transformer, installed
from tl_devicefix.twin import LIMIT, undisturbed

NAMES = {
    str(fields): name
    for name, fields in known_fields().items()
    if fields["model_type"] in CONFIG_MAPPING  # Qwen 1's code comes with its checkpoint
}.values()
"""One name of each config."""

WRONG = {"mistralai/Mixtral-8x7B-v0.1": Version("3")}
"""Models that a plain load warns of -> the TransformerLens version that mended them."""


def differences(difference_of):
    """Name -> the difference of its twin."""
    with undisturbed():
        return {name: difference_of(name) for name in NAMES}


def wrong_of(found):
    return {name for name, difference in found.items() if not difference <= LIMIT}


@pytest.mark.skipif(not has_hooked_transformer(), reason="TransformerLens 4 has no such class")
def test_hooked_twins_of_known_models_are_right():
    import transformer_lens.loading_from_pretrained as tl_loading

    from tl_devicefix.hooked_transformer.config import model_config
    from tl_devicefix.hooked_transformer.loading import applicable_steps
    from tl_devicefix.hooked_transformer.twin import difference

    flags = ("fold_ln", "center_writing_weights", "center_unembed", "fold_value_biases")
    asked = {**dict.fromkeys(flags, True), "refactor_factored_attn_matrices": False}

    def difference_of(name):
        if name not in tl_loading.OFFICIAL_MODEL_NAMES:
            return 0.0
        cfg = model_config(name, prefer_known=True, dtype=torch.float32, device="cpu")
        return difference(known_config(name), cfg, applicable_steps(cfg, asked), None)

    expected = {name for name, version in WRONG.items() if installed() < version}
    assert wrong_of(differences(difference_of)) == expected


@pytest.mark.skipif(not has_bridge(), reason="TransformerLens 2 and early 3 have no Bridge")
@pytest.mark.parametrize("compatibility", [None, {}], ids=["as booted", "compatibility mode"])
def test_bridge_twins_of_known_models_are_right(compatibility):
    from tl_devicefix.transformer_bridge.twin import difference

    found = differences(lambda name: difference(known_config(name), name, compatibility))
    assert wrong_of(found) == set()

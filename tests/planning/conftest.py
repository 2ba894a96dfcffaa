"""Models to compare with: toys, and what a name or a config is loaded as."""

from __future__ import annotations

import copy

import pytest
from model_classes import CLASSES, HOOKED


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

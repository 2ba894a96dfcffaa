"""Loaded models to compare plans with, and the class that a plan assumes."""

import copy

import pytest
from model_classes import CLASSES, HOOKED


@pytest.fixture
def model_class():
    """HookedTransformer, or a Bridge with TransformerLens 4: the class that a plan assumes."""
    return CLASSES[0]


@pytest.fixture
def loaded(load, hf_models):
    """`loaded("llama", 3)`: a model across three devices, and its config."""

    def get(name, n_devices):
        model = load(name, n_devices=n_devices)
        return model, copy.deepcopy(model.cfg) if HOOKED in CLASSES else hf_models(name).config

    return get

"""Models to compare with: toys, and what a name or a config is loaded as."""

from __future__ import annotations

import copy

import pytest

from tl_devicefix.monkeypatch.versions import has_hooked_transformer

if not has_hooked_transformer():
    from bridges import boot  # noqa: F401


@pytest.fixture
def loaded(hf_models, request):
    """`loaded("llama", 3)`: a model over so many devices, and its config.

    A HookedTransformer, or with TransformerLens 4 a Bridge, as a name is before loading.
    """
    if not has_hooked_transformer():
        boot = request.getfixturevalue("boot")
        return lambda name, n: (boot(name, n_devices=n), hf_models(name).config)
    from_pretrained = request.getfixturevalue("from_pretrained")

    def load(name, n_devices):
        model = from_pretrained(name, n_devices=n_devices)
        return model, copy.deepcopy(model.cfg)

    return load

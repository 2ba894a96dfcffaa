"""Models to compare with: toys, and what a name or a config is loaded as."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from tl_devicefix.monkeypatch.versions import has_hooked_transformer

if not has_hooked_transformer():
    from bridges import boot  # noqa: F401


@pytest.fixture
def loaded(hf_models: Any, request: pytest.FixtureRequest) -> Callable[[str, int], tuple[Any, Any]]:
    """`loaded("llama", 3)`: a model over so many devices, and its config.

    A HookedTransformer, or with TransformerLens 4 a Bridge, as a name is before loading.
    """
    if not has_hooked_transformer():
        boot = request.getfixturevalue("boot")
        return lambda name, n: (boot(name, n_devices=n), hf_models(name).config)
    from_pretrained = request.getfixturevalue("from_pretrained")

    def load(name: str, n_devices: int) -> tuple[Any, Any]:
        model = from_pretrained(name, n_devices=n_devices)
        return model, copy.deepcopy(model.cfg)

    return load

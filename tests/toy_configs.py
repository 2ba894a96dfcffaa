"""Configs of toy models, of which only the sizes matter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from architectures import toy_config
from transformer_lens import HookedTransformerConfig


@pytest.fixture
def config() -> Callable[..., HookedTransformerConfig]:
    """`config(n_layers=26, d_vocab=500)`."""

    sizes = {"n_layers": 6, "d_mlp": 24, "n_ctx": 8, "act_fn": "relu", "init_weights": True}
    return lambda **options: toy_config(**{**sizes, **options})

"""Configs of toy models, of which only the sizes matter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from transformer_lens import HookedTransformerConfig


@pytest.fixture
def config() -> Callable[..., HookedTransformerConfig]:
    """`config(n_layers=26, d_vocab=500)`."""

    def make(**options: Any) -> HookedTransformerConfig:
        sizes: dict[str, Any] = {
            "n_layers": 6,
            "d_model": 16,
            "n_heads": 4,
            "d_head": 4,
            "d_mlp": 24,
            "d_vocab": 40,
            "n_ctx": 8,
            "act_fn": "relu",
            "normalization_type": "LN",
            "device": "cpu",
        }
        return HookedTransformerConfig(**{**sizes, **options})

    return make

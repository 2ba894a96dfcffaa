"""Models to check: spread over the devices of `machine`, for one test to change as it likes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from architectures import TOYS, build_toy
from transformer_lens import HookedTransformer


@pytest.fixture
def load(machine: Any, from_pretrained: Any) -> Callable[..., HookedTransformer]:
    """`load("gpt2", n_devices=3)`: by default over four devices. Toys are built from configs."""

    def load(name: str, n_devices: int = 4, **options: Any) -> HookedTransformer:
        if name in TOYS:
            return build_toy(TOYS[name](), None, "sim:0", n_devices)
        return from_pretrained(name, n_devices=n_devices, **options)

    return load


@pytest.fixture
def model(load: Any) -> HookedTransformer:
    """A Llama over four devices; each version of TransformerLens would spread it otherwise."""
    blocks = {f"blocks.{layer}": device for layer, device in enumerate((0, 1, 2, 2, 3))}
    return load("llama", n_devices=1, device_map={"": 0, **blocks})


@pytest.fixture
def reference(references: Any) -> HookedTransformer:
    """The same weights on the CPU."""
    return references("llama")

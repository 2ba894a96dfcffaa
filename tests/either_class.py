"""Scenarios that are written once for both classes: over four devices, beside one CPU.

HookedTransformer and TransformerBridge, as far as the installed TransformerLens has them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tl_devicefix.monkeypatch.versions import has_bridge, has_hooked_transformer

HOOKED, BRIDGE = "HookedTransformer", "TransformerBridge"
CLASSES = [*([HOOKED] if has_hooked_transformer() else []), *([BRIDGE] if has_bridge() else [])]

Get = Callable[[str], Any]
"""An architecture ("llama", "gpt2") -> a model."""


@pytest.fixture
def kind() -> str:
    """Which architecture the model has; parametrise it for others."""
    return "llama"


@pytest.fixture
def at_home(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """The tokens, where the model wants them."""
    return tokens.to(model.cfg.device)


@pytest.fixture(params=CLASSES)
def cls(request: pytest.FixtureRequest) -> str:
    """The class of the models."""
    return request.param


@pytest.fixture
def over_devices(cls: str, request: pytest.FixtureRequest) -> Get:
    """`over_devices("llama")`: a new model over four devices.

    A Bridge lies as accelerate's "balanced" has it, and is not folded.
    """
    if cls == BRIDGE:
        return request.getfixturevalue("dispatched")
    return request.getfixturevalue("load")


@pytest.fixture
def from_checkpoint(cls: str, request: pytest.FixtureRequest) -> Callable[..., Any]:
    """`from_checkpoint("llama", device_map=...)`: a new model, as users load it."""
    return request.getfixturevalue("boot" if cls == BRIDGE else "from_pretrained")


@pytest.fixture
def on_one(cls: str, request: pytest.FixtureRequest) -> Get:
    """`on_one("llama")`: the same weights, as TransformerLens alone has them on one CPU."""
    if cls == BRIDGE:
        boot = request.getfixturevalue("boot")
        return lambda kind: boot(kind, device="cpu")
    return request.getfixturevalue("on_cpu")


@pytest.fixture
def folded(cls: str, request: pytest.FixtureRequest) -> Callable[..., Any]:
    """`folded("llama", 4)`: a new model with folded weights, over so many devices."""
    if cls == BRIDGE:
        boot = request.getfixturevalue("boot")
        return lambda kind, n_devices, **where: boot(
            kind, compatible=True, n_devices=n_devices, **where
        )
    return request.getfixturevalue("load")


@pytest.fixture
def folded_on_one(cls: str, request: pytest.FixtureRequest) -> Get:
    """`folded_on_one("llama")`: the same on one CPU."""
    if cls == BRIDGE:
        references = request.getfixturevalue("bridge_references")
        return lambda kind: references(kind, compatible=True)
    return request.getfixturevalue("on_cpu")

"""Pairs of models with the same weights: one over several simulated devices, one on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from architectures import attention_only_config, randomize
from kinds import KINDS, Spread, load_spread
from transformer_lens import HookedTransformer

import tl_devicefix
from tl_devicefix.simulation.machine import Machine


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    """A simulated machine of four devices, open for a whole module so that models are shared."""
    with tl_devicefix.simulate(4) as machine:
        yield machine


@pytest.fixture(scope="session")
def toys(tokenizer: Any) -> Callable[..., HookedTransformer]:
    """`toys("sim:0", 4)`: an attention-only model that is built from its config."""

    def build(device: str, n_devices: int) -> HookedTransformer:
        cfg = attention_only_config(device=device)
        cfg.n_devices = n_devices  # as an argument, TransformerLens would count CUDA devices
        model = HookedTransformer(cfg, tokenizer)
        randomize(model)  # always with the same values
        return model

    return build


@pytest.fixture(scope="module")
def load(machine: Machine, hf_models: Any, tokenizer: Any, toys: Any) -> Callable[..., Any]:
    """`load("gpt2", 4)`: a model over four devices, for one test to change as it likes."""

    def load(kind: str, spread: Spread = 4, **options: Any) -> HookedTransformer:
        if kind == "attention-only":
            return toys("sim:0", spread)
        return load_spread(kind, spread, hf_models(KINDS[kind].name), tokenizer, **options)

    return load


@pytest.fixture(scope="module")
def models(load: Any) -> Callable[..., HookedTransformer]:
    """As `load`, but loaded once for the tests of a module: not to be changed."""
    loaded: dict[Any, HookedTransformer] = {}

    def get(kind: str, spread: Spread) -> HookedTransformer:
        if (kind, spread) not in loaded:
            loaded[kind, spread] = load(kind, spread)
        return loaded[kind, spread]

    return get


@pytest.fixture
def kind() -> str:
    """Which of `KINDS` the model is; parametrise it for others."""
    return "llama"


@pytest.fixture
def spread() -> Spread:
    """Over how many devices the model lies; parametrise it for others."""
    return 4


@pytest.fixture
def model(models: Any, kind: str, spread: Spread) -> Iterator[HookedTransformer]:
    """The model under test; hooks and gradients are gone after each test."""
    model = models(kind, spread)
    yield model
    _clean(model)


@pytest.fixture
def reference(references: Any, toys: Any, kind: str) -> Iterator[HookedTransformer]:
    """The same weights in a model on the CPU, as TransformerLens loads it."""
    is_toy = kind == "attention-only"
    options = KINDS[kind].options
    reference = toys("cpu", 1) if is_toy else references(KINDS[kind].name, **options)
    yield reference
    _clean(reference)


def _clean(model: HookedTransformer) -> None:
    model.reset_hooks(including_permanent=True)
    model.zero_grad()


@pytest.fixture(scope="session")
def other_tokens(tokens: torch.Tensor) -> torch.Tensor:
    """A second batch, to patch from."""
    return tokens.flip(1)


@pytest.fixture(scope="session")
def mask(tokens: torch.Tensor) -> torch.Tensor:
    """An attention mask for `tokens`, on the CPU: the first sequence has three pads on the left."""
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    return mask

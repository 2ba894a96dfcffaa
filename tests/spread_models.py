"""Pairs of models with the same weights: one over several simulated devices, one on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from architectures import attention_only_config, build_toy
from hf_models import padded
from kinds import KINDS, Kind, Spread, where_to
from transformer_lens import HookedTransformer

from tl_devicefix.simulation.machine import Machine, Transfer


@pytest.fixture(scope="module")
def machine(simulated: Any) -> Iterator[Machine]:
    """A simulated machine of four devices, open for a whole module so that models are shared."""
    with simulated(4) as machine:
        yield machine


@pytest.fixture(scope="session")
def toys(tokenizer: Any) -> Callable[..., HookedTransformer]:
    """`toys("sim:0", 4)`: an attention-only model that is built from its config."""
    return lambda *devices: build_toy(attention_only_config(), tokenizer, *devices)


@pytest.fixture(scope="module")
def load(machine: Machine, from_pretrained: Any, toys: Any) -> Callable[..., Any]:
    """`load("gpt2", 4)`: a model over four devices, for one test to change as it likes."""

    def load(kind: str, spread: Spread = 4, **options: Any) -> HookedTransformer:
        if kind == "attention-only":
            model = toys("sim:0", spread)
        else:
            of_kind = KINDS.get(kind, Kind(kind))
            options = {**where_to(kind, spread), **of_kind.options, **options}
            model = from_pretrained(of_kind.name, **options)
        if hasattr(model, "placement"):  # not if it is unpatched
            assert spread == 1 or len(model.placement.memories) > 1
        return model

    return load


@pytest.fixture(scope="module")
def models(load: Any) -> Callable[..., HookedTransformer]:
    """As `load`, but loaded once for the tests of a module: not to be changed."""
    return cache(load)


@pytest.fixture
def spread() -> Spread:
    """Over how many devices the model lies; parametrise it for others."""
    return 4


@pytest.fixture
def model(models: Any, kind: str, spread: Spread) -> HookedTransformer:
    """The model under test, without traces of earlier tests."""
    model = models(kind, spread)
    _clean(model)
    return model


@pytest.fixture
def on_cpu(references: Any) -> Callable[..., HookedTransformer]:
    """`on_cpu("gpt2")`: as TransformerLens loads it there, without traces of earlier tests."""

    def get(name: str, **options: Any) -> HookedTransformer:
        reference = references(name, **options)
        _clean(reference)
        return reference

    return get


@pytest.fixture
def reference(on_cpu: Any, toys: Any, kind: str) -> HookedTransformer:
    """The same weights as `model` has, on the CPU."""
    if kind == "attention-only":
        return toys("cpu", 1)
    return on_cpu(KINDS[kind].name, **KINDS[kind].options)


def _clean(model: HookedTransformer) -> None:
    model.reset_hooks(including_permanent=True)
    model.zero_grad()
    for block in model.blocks:
        # TransformerLens keeps the ALiBi bias of the longest input, and adds a part of it to the
        # attention scores of a shorter one that differs by a constant for each query.
        block.attn.alibi = None


@pytest.fixture
def transfers_of(machine: Machine) -> Callable[..., list[Transfer]]:
    """`transfers_of(f, x)` calls `f(x)` and returns the copies that it made."""

    def transfers_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Transfer]:
        machine.reset_transfers()
        function(*args, **kwargs)
        return list(machine.transfers)

    return transfers_of


@pytest.fixture(scope="session")
def other_tokens(tokens: torch.Tensor) -> torch.Tensor:
    """A second batch, to patch from."""
    return tokens.flip(1)


@pytest.fixture(scope="session")
def mask(tokens: torch.Tensor) -> torch.Tensor:
    """An attention mask for `tokens`, on the CPU."""
    return padded(tokens)

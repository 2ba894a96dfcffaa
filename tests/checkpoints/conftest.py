"""Live Hugging Face models that are adapted, quantised or offloaded, and what they amount to."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import (
    ALL_ARCHITECTURES,
    NO_PROCESSING,
    Architecture,
    load_hooked,
)
from hf_models import make_hf_model, save_checkpoint
from refusals import file_of_fixture, refused, snapshot, tensors, write_checkpoint  # noqa: F401
from transformer_lens import HookedTransformer
from transformers import PreTrainedModel
from wide import WIDE

import tl_devicefix


@pytest.fixture(params=[{}, NO_PROCESSING], ids=["folded", "unfolded"])
def processing(request: pytest.FixtureRequest) -> dict[str, bool]:
    return request.param


@pytest.fixture
def load(machine: Any, tokenizer: Any) -> Callable[..., HookedTransformer]:
    """`load("gpt2", hf_model)`: over the first three devices, unless options say otherwise."""

    def load(
        architecture: str | Architecture, hf_model: torch.nn.Module, **options: Any
    ) -> HookedTransformer:
        if isinstance(architecture, str):
            architecture = ALL_ARCHITECTURES[architecture]
        options = {"n_devices": min(3, len(machine.devices)), **options}
        return load_hooked(architecture, hf_model, tokenizer, **options)  # type: ignore[arg-type]

    return load


@pytest.fixture(scope="session")
def reference_of(tokenizer: Any) -> Callable[..., HookedTransformer]:
    """`reference_of("gpt2", plain_model)`: as unpatched TransformerLens loads it on one CPU."""

    def reference_of(
        architecture: str | Architecture, hf_model: Any, **options: Any
    ) -> HookedTransformer:
        if isinstance(architecture, str):
            architecture = ALL_ARCHITECTURES[architecture]
        with tl_devicefix.disabled():
            return load_hooked(architecture, hf_model, tokenizer, device="cpu", **options)

    return reference_of


@pytest.fixture(scope="session")
def wide_models() -> Callable[[str], PreTrainedModel]:
    """`wide_models("gpt2")`, wide enough to be quantised: shared, so not to be changed."""
    return functools.cache(lambda name: make_hf_model(WIDE[name].hf_config()))


@pytest.fixture(scope="session")
def quantised(
    wide_models: Any, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], PreTrainedModel]:
    """`quantised("gpt2", "nf4")`: a new model, quantised by transformers and bitsandbytes."""
    from quantising import quantise  # which skips if there is no bitsandbytes

    @functools.cache
    def checkpoint(name: str) -> Path:
        directory = tmp_path_factory.mktemp("checkpoint")
        return save_checkpoint(wide_models(name), tokenizer, directory)

    return lambda name, kind: quantise(checkpoint(name), kind)


@pytest.fixture
def without_library(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """`without_library("peft")`: as if it were not installed; what is in use of it goes on."""

    def without_library(name: str) -> None:
        for module in [each for each in sys.modules if each.split(".")[0] == name]:
            monkeypatch.delitem(sys.modules, module)
        monkeypatch.setitem(sys.modules, name, None)

    return without_library


@torch.no_grad()
def predictions(hf_model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """What a Hugging Face model predicts, by its own forward, as `comparison.log_probs`."""
    return hf_model(tokens.to(hf_model.device)).logits.cpu().log_softmax(dim=-1)


@pytest.fixture(name="predictions")
def predictions_fixture() -> Callable[..., torch.Tensor]:
    return predictions

"""SAELens's runs over a model on four devices: what it stores, what it caches, what it trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from comparison import assert_agrees
from datasets import Dataset
from hf_models import D_MODEL, D_VOCAB
from sae_lens import (
    ActivationsStore,
    LanguageModelSAERunnerConfig,
    LanguageModelSAETrainingRunner,
    StandardTrainingSAEConfig,
)
from sae_lens.config import LoggingConfig

HOOK = "blocks.3.hook_resid_post"
"""A hook point that is not at home."""

N_CTX = 8


BATCHES: dict[str, Any] = {
    "streaming": False,
    "context_size": N_CTX,
    "prepend_bos": False,
    "n_batches_in_buffer": 4,
    "store_batch_size_prompts": 2,
    "train_batch_size_tokens": 16,
}
"""How a store reads the data, by itself and in training."""


@pytest.fixture
def both(model: Any, reference: Any) -> tuple[Any, Any]:
    """A Llama over four devices, and as TransformerLens alone has it on one CPU."""
    assert model.placement.device_of(HOOK) != model.placement.home
    return model, reference


@pytest.fixture(scope="module")
def data() -> Dataset:
    """Sequences of tokens that are tokenised already."""
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(3, D_VOCAB, (24, N_CTX), generator=generator)
    return Dataset.from_dict({"input_ids": tokens.tolist()})


def store_of(model: Any, data: Dataset, device: str) -> ActivationsStore:
    return ActivationsStore(
        model,
        data,
        **BATCHES,
        hook_name=HOOK,
        hook_head_index=None,
        d_in=D_MODEL,
        total_training_tokens=128,
        normalize_activations="none",
        device=torch.device(device),
        dtype="float32",
        activations_mixing_fraction=0.0,
    )


@pytest.mark.parametrize("device", ["cpu", "sim:0", "sim:3"])
def test_what_a_store_holds(device: str, both: tuple[Any, Any], data: Dataset) -> None:
    """Wherever the SAE is that it is for."""
    model, reference = both
    ours, theirs = store_of(model, data, device), store_of(reference, data, "cpu")
    for _ in range(2):
        tokens = ours.get_batch_tokens()
        expected = theirs.get_batch_tokens()
        assert_agrees(tokens, expected, model.placement.home)
        assert_agrees(ours.get_activations(tokens), theirs.get_activations(expected))
    torch.manual_seed(0)
    actual = ours.next_batch()
    torch.manual_seed(0)
    assert_agrees(actual, theirs.next_batch(), torch.device(device))


@pytest.fixture
def train(data: Dataset, tmp_path: Path) -> Callable[..., dict[str, torch.Tensor]]:
    """`train(model, "sim:0")`: the weights of an SAE after a few steps."""

    def train(model: Any, device: str) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        config = LanguageModelSAERunnerConfig(
            sae=StandardTrainingSAEConfig(d_in=D_MODEL, d_sae=24, device=device),
            model_name="llama",
            hook_name=HOOK,
            dataset_path="in memory",
            is_dataset_tokenized=True,
            **BATCHES,
            training_tokens=64,
            lr=1e-2,
            device=device,
            n_checkpoints=0,
            checkpoint_path=str(tmp_path),
            output_path=str(tmp_path / "sae"),
            logger=LoggingConfig(log_to_wandb=False),
        )
        runner = LanguageModelSAETrainingRunner(config, override_dataset=data, override_model=model)
        return dict(runner.run().state_dict())

    return train


def test_training_an_sae(both: tuple[Any, Any], train: Any) -> None:
    model, reference = both
    actual = train(model, "sim:0")
    assert_agrees(actual, train(reference, "cpu"), model.placement.home, tolerance=1e-4)

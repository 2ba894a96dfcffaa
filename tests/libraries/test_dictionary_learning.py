"""dictionary_learning trains on saved activations, unmodified: `nox -s dictionary-learning`."""

import pytest
import torch
from written_by_hand import D_MODEL, N_EXAMPLES, RESID, WIDTH, write_by_hand

pytest.importorskip(
    "dictionary_learning",
    reason="dictionary_learning is not installed: run `nox -s dictionary-learning`",
)

from dictionary_learning import AutoEncoder
from dictionary_learning.trainers import StandardTrainer
from dictionary_learning.training import trainSAE

BATCH = 11


def test_its_training_takes_batches_of_tokens_as_its_buffer(tmp_path):
    written = write_by_hand(tmp_path / "written", torch.float32)
    steps = 2 * N_EXAMPLES * WIDTH // BATCH

    def trained_on(batches, directory):
        config = {"trainer": StandardTrainer, "dict_class": AutoEncoder}
        config |= {"activation_dim": D_MODEL, "dict_size": 8, "layer": 0, "lm_name": "none"}
        config |= {"lr": 1e-3, "seed": 0, "device": "cpu", "steps": steps}
        config |= {"warmup_steps": 1, "sparsity_warmup_steps": None}
        trainSAE(batches, [config], steps, save_dir=str(directory), device="cpu")
        return torch.load(directory / "trainer_0" / "ae.pt")

    options = {"batch_size": BATCH, "epochs": 2, "seed": 1}
    actual = trained_on(written.activations(RESID, **options), tmp_path / "ours")
    expected = trained_on(iter(list(written.activations(RESID, **options))), tmp_path / "theirs")

    assert all(torch.equal(actual[name], expected[name]) for name in expected)

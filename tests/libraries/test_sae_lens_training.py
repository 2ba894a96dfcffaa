"""SAELens trains, unmodified: on saved activations, and over a spread model."""

import hf_models
import pytest
import torch
from comparison import assert_agrees
from datasets import Dataset
from devices import device
from model_classes import HOOKED, HookedTransformer
from sae_lens import (
    LanguageModelSAERunnerConfig,
    LanguageModelSAETrainingRunner,
    StandardTrainingSAE,
    StandardTrainingSAEConfig,
)
from sae_lens.config import LoggingConfig, SAETrainerConfig
from sae_lens.training.sae_trainer import SAETrainer
from written_by_hand import D_MODEL, N_EXAMPLES, RESID, WIDTH, write_by_hand

pytestmark = pytest.mark.hooked

N_TOKENS = N_EXAMPLES * WIDTH


@pytest.fixture
def written(tmp_path):
    return write_by_hand(tmp_path / "written")


def trained_on(batches):
    torch.manual_seed(0)
    sae = StandardTrainingSAE(StandardTrainingSAEConfig(D_MODEL, 8, device="cpu"))
    config = SAETrainerConfig(2 * N_TOKENS, 16, lr=1e-2, lr_end=1e-3)
    trained = SAETrainer(config, sae, batches).fit()
    return {name: tensor.clone() for name, tensor in trained.state_dict().items()}


def test_a_trainer_takes_batches_of_tokens_as_its_data(written):
    def batches():
        return written.activations(RESID, 16, seed=3, epochs=2)

    actual, expected = trained_on(batches()), trained_on(iter(list(batches())))
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


HOOK, N_CTX = "blocks.3.hook_resid_post", 8


@pytest.fixture(scope="module")
def data():
    """Sequences of tokens that are tokenised already."""
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(3, hf_models.D_VOCAB, (24, N_CTX), generator=generator)
    return Dataset.from_dict({"input_ids": tokens.tolist()})


@pytest.fixture(scope="module")
def train(data, tmp_path_factory):
    """`train(model, "sim:0")`: the weights of an SAE after a few steps."""
    options = {"model_name": "llama", "hook_name": HOOK, "lr": 1e-2}
    options |= {"dataset_path": "in memory", "streaming": False}
    options |= {"context_size": N_CTX, "prepend_bos": False, "n_batches_in_buffer": 4}
    options |= {"store_batch_size_prompts": 2, "train_batch_size_tokens": 16, "training_tokens": 64}
    options |= {"logger": LoggingConfig(log_to_wandb=False)}

    def train(model: HookedTransformer, device):
        torch.manual_seed(0)
        sae = StandardTrainingSAEConfig(d_in=hf_models.D_MODEL, d_sae=24, device=device)
        path = str(tmp_path_factory.mktemp("sae"))
        paths = {"checkpoint_path": path, "output_path": path}
        config = LanguageModelSAERunnerConfig(sae=sae, device=device, **paths, **options)
        runner = LanguageModelSAETrainingRunner(config, override_dataset=data, override_model=model)
        return dict(runner.run().state_dict())

    return train


@pytest.fixture(scope="module")
def expected(train, references):
    return train(references(HOOKED, "llama"), "cpu")


@pytest.mark.parametrize("device", ["cpu", device(0), device(3)])
def test_sae_trains_as_on_one_device_wherever_it_is(device, model, train, expected):
    """Wherever the SAE is, of a hook point that is not at home."""
    assert model.placement.device_of(HOOK) != model.placement.home
    assert_agrees(train(model, device), expected, torch.device(device), tolerance=1e-4)

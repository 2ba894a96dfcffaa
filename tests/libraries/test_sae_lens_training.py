"""SAELens trains, unmodified: on saved activations, on a data set, and over a spread model."""

import hf_models
import pytest
import torch
from comparison import assert_agrees
from datasets import Array2D, Dataset, Features, Sequence, Value
from sae_lens import (
    ActivationsStore,
    LanguageModelSAERunnerConfig,
    LanguageModelSAETrainingRunner,
    StandardTrainingSAE,
    StandardTrainingSAEConfig,
)
from sae_lens.config import LoggingConfig, SAETrainerConfig
from sae_lens.training.sae_trainer import SAETrainer
from written_by_hand import D_MODEL, N_EXAMPLES, RESID, WIDTH, write_by_hand

N_TOKENS = N_EXAMPLES * WIDTH


@pytest.fixture
def written(tmp_path):
    return write_by_hand(tmp_path / "written")


def trained_on(batches):
    """The weights of an SAE after two epochs."""
    torch.manual_seed(0)
    sae = StandardTrainingSAE(StandardTrainingSAEConfig(D_MODEL, 8, device="cpu"))
    config = SAETrainerConfig(
        total_training_samples=2 * N_TOKENS,
        train_batch_size_samples=16,
        device="cpu",
        lr=1e-2,
        lr_end=1e-3,
        lr_scheduler_name="constant",
        lr_warm_up_steps=0,
        lr_decay_steps=0,
        n_restart_cycles=1,
        adam_beta1=0.9,
        adam_beta2=0.999,
        feature_sampling_window=100,
        dead_feature_window=100,
        n_checkpoints=0,
        checkpoint_path=None,
        save_final_checkpoint=False,
        autocast=False,
        logger=LoggingConfig(log_to_wandb=False),
    )
    trained = SAETrainer(config, sae, batches).fit()
    return {name: tensor.clone() for name, tensor in trained.state_dict().items()}


def test_a_trainer_takes_batches_of_tokens_as_its_data(written):
    def batches():
        return written.activations(RESID, 16, seed=3, epochs=2)

    actual, expected = trained_on(batches()), trained_on(iter(list(batches())))

    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_an_activation_store_reads_the_data_set(written, tmp_path):
    saved = tmp_path / "saved"
    saved_as_data_set(written, saved)
    store = ActivationsStore(
        None,  # no model is run
        Dataset.from_dict({"input_ids": written.tokens[:].tolist()}),
        streaming=False,
        hook_name=RESID,
        hook_head_index=None,
        context_size=WIDTH,
        d_in=D_MODEL,
        n_batches_in_buffer=2,
        total_training_tokens=N_TOKENS,
        store_batch_size_prompts=2,
        train_batch_size_tokens=WIDTH,
        prepend_bos=False,
        normalize_activations="none",
        device=torch.device("cpu"),
        dtype="float32",
        cached_activations_path=str(saved),
    )
    rows = store.next_batch()
    written_rows = {tuple(row.tolist()) for row in written[RESID][:].flatten(0, 1)}
    assert rows.shape == (WIDTH, D_MODEL)
    assert {tuple(row.tolist()) for row in rows} <= written_rows


def saved_as_data_set(h, path):
    """As docs/save_activations.md has it; Arrow has no bfloat16."""

    def rows():
        for number in range(len(h)):
            activation, tokens = h[RESID][number].float(), h.tokens[number].int()
            yield {RESID: activation.numpy(), "token_ids": tokens.numpy()}

    _, n_ctx, width = h[RESID].shape
    features = Features(
        {RESID: Array2D((n_ctx, width), "float32"), "token_ids": Sequence(Value("int32"), n_ctx)}
    )
    Dataset.from_generator(rows, features, cache_dir=str(path.parent)).save_to_disk(path)


HOOK, N_CTX = "blocks.3.hook_resid_post", 8


@pytest.fixture(scope="module")
def data():
    """Sequences of tokens that are tokenised already."""
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(3, hf_models.D_VOCAB, (24, N_CTX), generator=generator)
    return Dataset.from_dict({"input_ids": tokens.tolist()})


@pytest.fixture
def train(data, tmp_path):
    """`train(model, "sim:0")`: the weights of an SAE after a few steps."""

    def train(model, device):
        torch.manual_seed(0)
        config = LanguageModelSAERunnerConfig(
            sae=StandardTrainingSAEConfig(d_in=hf_models.D_MODEL, d_sae=24, device=device),
            model_name="llama",
            hook_name=HOOK,
            dataset_path="in memory",
            is_dataset_tokenized=True,
            streaming=False,
            context_size=N_CTX,
            prepend_bos=False,
            n_batches_in_buffer=4,
            store_batch_size_prompts=2,
            train_batch_size_tokens=16,
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


@pytest.mark.parametrize("device", ["cpu", "sim:0", "sim:3"])
def test_training_an_sae(device, model, reference, train):
    """Wherever the SAE is, of a hook point that is not at home."""
    assert model.placement.device_of(HOOK) != model.placement.home
    actual = train(model, device)
    assert_agrees(actual, train(reference, "cpu"), torch.device(device), tolerance=1e-4)

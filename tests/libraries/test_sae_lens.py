"""SAELens over several devices: its HookedSAETransformer, with SAEs at home, and its training."""

import pytest
import torch
import written_by_hand
from comparison import assert_agrees
from datasets import Dataset
from devices import device
from hf_models import D_MODEL, D_VOCAB, randomize
from model_classes import HOOKED, HookedTransformer
from sae_lens import (
    HookedSAETransformer,
    LanguageModelSAERunnerConfig,
    LanguageModelSAETrainingRunner,
    StandardSAE,
    StandardSAEConfig,
    StandardTrainingSAE,
    StandardTrainingSAEConfig,
)
from sae_lens.config import LoggingConfig, SAETrainerConfig
from sae_lens.load_model import load_model
from sae_lens.saes.sae import SAEMetadata
from sae_lens.training.sae_trainer import SAETrainer

import tl_devicefix

pytestmark = pytest.mark.hooked

HOOK = "blocks.2.hook_resid_post"
WHERE = {"": 0, "blocks.1": 1, "blocks.2": 2, "blocks.3": 3}


def make_sae(device):
    """An SAE, always with the same weights."""
    metadata = SAEMetadata(hook_name=HOOK)
    sae = StandardSAE(StandardSAEConfig(D_MODEL, 24, device="cpu", metadata=metadata))
    randomize(sae)
    return sae.to(device)


@pytest.fixture(scope="module")
def loaded(checkpoints, machine_of_module):
    load = HookedSAETransformer.from_pretrained_no_processing
    return load(checkpoints("qwen2"), device_map=WHERE), load(checkpoints("qwen2"), device="cpu")


@pytest.fixture
def models(loaded):
    """The tiny Qwen2 over four devices, and unpatched on the CPU."""
    for model in loaded:
        model.reset_saes()
    return loaded


def test_a_model_loaded_through_its_own_kwargs_is_spread(checkpoints, machine, monkeypatch, tokens):
    by_hand = HookedTransformer.from_pretrained_no_processing(checkpoints("qwen2"), n_devices=4)
    load = HookedTransformer.from_pretrained_no_processing

    def on_simulated(model_name, **kwargs):
        assert kwargs.pop("device") == "cuda"  # which SAELens writes for n_devices > 1
        return load(model_name, device=device(0), **kwargs)

    monkeypatch.setattr(HookedTransformer, "from_pretrained_no_processing", on_simulated)
    options = {"device": "cuda", "model_from_pretrained_kwargs": {"n_devices": 4}}
    model = load_model("HookedTransformer", str(checkpoints("qwen2")), **options)
    assert model.placement.devices == by_hand.placement.devices
    assert_agrees(model(tokens), by_hand(tokens), model.placement.home)


@pytest.mark.parametrize("at", [device(0), device(2)])
def test_an_sae_runs_wherever_it_is_and_is_left_as_it_was(at, models, tokens):
    model, reference = models
    home, sae, its_reference = model.placement.home, make_sae(at), make_sae("cpu")
    expected, theirs = reference.run_with_cache_with_saes(tokens, saes=[its_reference])
    assert not torch.allclose(expected, reference(tokens))

    logits, cache = model.run_with_cache_with_saes(tokens, saes=[sae])

    assert f"{HOOK}.hook_sae_acts_post" in cache
    assert_agrees([logits, dict(cache.items())], [expected, dict(theirs.items())], home)
    assert_agrees(model(tokens), reference(tokens), home)
    model.add_sae(sae)
    assert tl_devicefix.check(model, repair=True)
    assert_agrees(model(tokens), expected, home)
    model.reset_saes()
    assert_agrees(model(tokens), reference(tokens), home)
    assert {parameter.device for parameter in sae.parameters()} == {torch.device(at)}
    assert all("forward" not in vars(module) for module in sae.modules())
    assert tl_devicefix.patches.is_enabled()


def test_runs_in_flight_have_the_models_sae(models, tokens):
    model, reference = models
    model.add_sae(make_sae(device(0)))
    expected = model(tokens)
    assert not torch.allclose(expected.cpu(), reference(tokens))
    zero = (f"{HOOK}.hook_sae_acts_post", lambda activation, hook: activation * 0)
    without, zeroed, again = tl_devicefix.sweep(model, tokens, [[], [zero], []])
    assert_agrees([without, again], [expected, expected])
    assert_agrees(zeroed, model.run_with_hooks(tokens, fwd_hooks=[zero]))
    assert not torch.allclose(zeroed, expected)


def trained_on(batches):
    n_tokens = written_by_hand.N_EXAMPLES * written_by_hand.WIDTH
    torch.manual_seed(0)
    sae = StandardTrainingSAE(StandardTrainingSAEConfig(written_by_hand.D_MODEL, 8, device="cpu"))
    config = SAETrainerConfig(2 * n_tokens, 16, lr=1e-2, lr_end=1e-3)
    trained = SAETrainer(config, sae, batches).fit()
    return {name: tensor.clone() for name, tensor in trained.state_dict().items()}


def test_a_trainer_takes_batches_of_tokens_as_its_data(tmp_path):
    written = written_by_hand.write_by_hand(tmp_path)

    def batches():
        return written.activations(written_by_hand.RESID, 16, seed=3, epochs=2)

    actual, expected = trained_on(batches()), trained_on(iter(list(batches())))
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


N_CTX = 8


@pytest.fixture(scope="module")
def data():
    """Sequences of tokens that are tokenised already."""
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(3, D_VOCAB, (24, N_CTX), generator=generator)
    return Dataset.from_dict({"input_ids": tokens.tolist()})


@pytest.fixture(scope="module")
def train(data, tmp_path_factory):
    """`train(model, "sim:0")`: the weights of an SAE after a few steps."""
    options = {"model_name": "llama", "hook_name": HOOK, "lr": 1e-2}
    options |= {"dataset_path": "in memory", "streaming": False}
    options |= {"context_size": N_CTX, "prepend_bos": False, "n_batches_in_buffer": 4}
    options |= {"store_batch_size_prompts": 2, "train_batch_size_tokens": 16, "training_tokens": 64}
    options |= {"logger": LoggingConfig(log_to_wandb=False)}

    def train(model, device):
        torch.manual_seed(0)
        sae = StandardTrainingSAEConfig(d_in=D_MODEL, d_sae=24, device=device)
        path = str(tmp_path_factory.mktemp("sae"))
        paths = {"checkpoint_path": path, "output_path": path}
        config = LanguageModelSAERunnerConfig(sae=sae, device=device, **paths, **options)
        runner = LanguageModelSAETrainingRunner(config, override_dataset=data, override_model=model)
        return dict(runner.run().state_dict())

    return train


@pytest.fixture(scope="module")
def expected(train, references):
    return train(references(HOOKED, "llama"), "cpu")


@pytest.mark.parametrize("device", [device(0), device(3)])
def test_sae_trains_as_on_one_device_wherever_it_is(device, model, train, expected):
    """Wherever the SAE is, of a hook point that is not at home."""
    assert model.placement.device_of(HOOK) != model.placement.home
    assert_agrees(train(model, device), expected, torch.device(device), tolerance=1e-4)

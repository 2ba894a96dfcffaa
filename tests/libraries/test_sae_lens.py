"""SAELens's HookedSAETransformer over several devices, with SAEs as users have them: at home."""

import pytest
import torch
from comparison import assert_agrees
from devices import device
from hf_models import D_MODEL
from model_classes import HookedTransformer
from sae_lens import HookedSAETransformer, StandardSAE, StandardSAEConfig
from sae_lens.load_model import load_model
from sae_lens.saes.sae import SAEMetadata

import tl_devicefix

pytestmark = pytest.mark.hooked

HOOK = "blocks.2.hook_resid_post"
WHERE = {"": 0, "blocks.1": 1, "blocks.2": 2, "blocks.3": 3}


def make_sae(device):
    """An SAE, always with the same weights."""
    metadata = SAEMetadata(hook_name=HOOK)
    sae = StandardSAE(StandardSAEConfig(D_MODEL, 24, device="cpu", metadata=metadata))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in sae.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
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

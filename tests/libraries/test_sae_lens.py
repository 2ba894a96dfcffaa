"""SAELens's HookedSAETransformer over several devices, with SAEs as users have them: at home."""

import pytest
import torch
from comparison import assert_agrees
from hf_models import D_MODEL
from sae_lens import HookedSAETransformer, StandardSAE, StandardSAEConfig
from sae_lens.load_model import load_model
from sae_lens.saes.sae import SAEMetadata
from transformer_lens import HookedTransformer

import tl_devicefix
from tl_devicefix.dispatch.views import restore, view_of

HOOK = "blocks.2.hook_resid_post"
"""A hook point on the third of four devices."""


@pytest.fixture
def machine():
    """For one test, as other models on it would change which device a block is on."""
    with tl_devicefix.simulate(4) as machine:
        yield machine


@pytest.fixture
def make_sae():
    """`make_sae("sim:0")`: always with the same weights."""

    def make(device, hook_name=HOOK):
        metadata = SAEMetadata(hook_name=hook_name)
        sae = StandardSAE(StandardSAEConfig(D_MODEL, 24, device="cpu", metadata=metadata))
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for parameter in sae.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
        return sae.to(device)

    return make


@pytest.fixture
def models(checkpoints, machine):
    """The tiny Qwen2 over four devices, and unpatched on the CPU."""
    checkpoint = checkpoints("qwen2")
    spread = HookedSAETransformer.from_pretrained_no_processing(checkpoint, n_devices=4)
    on_cpu = HookedSAETransformer.from_pretrained_no_processing(checkpoint, device="cpu")
    assert spread.placement.device_of(HOOK) == torch.device("sim:2")
    return spread, on_cpu


def test_a_model_loaded_through_its_own_kwargs_is_spread(checkpoints, machine, monkeypatch, tokens):
    by_hand = HookedTransformer.from_pretrained_no_processing(checkpoints("qwen2"), n_devices=4)
    load = HookedTransformer.from_pretrained_no_processing

    def on_simulated(model_name, device, **kwargs):
        assert device == "cuda"  # which SAELens writes for n_devices > 1
        return load(model_name, device="sim", **kwargs)

    monkeypatch.setattr(HookedTransformer, "from_pretrained_no_processing", on_simulated)
    model = load_model(
        "HookedTransformer",
        str(checkpoints("qwen2")),
        device="cuda",
        model_from_pretrained_kwargs={"n_devices": 4},
    )

    assert model.placement.devices == by_hand.placement.devices
    assert_agrees(model(tokens), by_hand(tokens), model.placement.home)


@pytest.mark.parametrize("at", ["sim:0", "sim:2"])
def test_running_with_an_sae_and_caching_its_activations(at, models, make_sae, tokens):
    model, reference = models
    expected, theirs = reference.run_with_cache_with_saes(tokens, saes=[make_sae("cpu")])
    assert not torch.allclose(expected, reference(tokens))

    logits, cache = model.run_with_cache_with_saes(tokens, saes=[make_sae(at)])

    assert f"{HOOK}.hook_sae_acts_post" in cache
    home = model.placement.home
    assert_agrees([logits, dict(cache.items())], [expected, dict(theirs.items())], home)
    assert_agrees(model(tokens), reference(tokens), home)


def test_an_sae_that_is_added_and_reset_is_left_as_it_was(models, make_sae, tokens):
    model, reference = models
    sae = make_sae("sim:0")
    model.add_sae(sae)
    reference.add_sae(make_sae("cpu"))
    assert_agrees(model(tokens), reference(tokens), model.placement.home)

    model.reset_saes()
    reference.reset_saes()

    assert_agrees(model(tokens), reference(tokens), model.placement.home)
    assert {parameter.device for parameter in sae.parameters()} == {torch.device("sim:0")}
    assert all("forward" not in vars(module) for module in sae.modules())
    assert tl_devicefix.patches.is_enabled()


@pytest.mark.parametrize("at", ["sim:0", "sim:2"])
def test_a_model_with_an_sae_is_well_wherever_the_sae_is(at, models, make_sae):
    model, _ = models
    sae = make_sae(at)
    model.add_sae(sae)

    report = tl_devicefix.check(model, repair=True)

    assert report, report
    assert {parameter.device for parameter in sae.parameters()} == {torch.device(at)}


def test_a_view_of_a_model_with_an_sae(models, make_sae, tokens):
    model, reference = models
    model.add_sae(make_sae("sim:0"))
    expected = model(tokens)
    without = reference(tokens)

    view, other = view_of(model), view_of(model)

    acts = f"{HOOK}.hook_sae_acts_post"
    assert all(one is two for one, two in zip(view.parameters(), model.parameters()))
    assert torch.equal(view(tokens).cpu(), expected.cpu())
    assert view.hook_dict[acts] is not model.hook_dict[acts]
    view.add_hook(acts, lambda activation, hook: activation * 0)
    assert not torch.equal(view(tokens).cpu(), expected.cpu())
    view.reset_saes()
    assert_agrees(view(tokens), without, model.placement.home)
    assert list(model.acts_to_saes) == list(other.acts_to_saes) == [HOOK]
    assert torch.equal(other(tokens).cpu(), expected.cpu())
    restore(view)
    for entry in (view, model):
        assert torch.equal(entry(tokens).cpu(), expected.cpu())

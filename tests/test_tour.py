"""A tour: what you can do with a model over several devices, in twenty short tests.

Each test runs on four simulated devices, with the small trained model that the package ships.
On GPUs, leave out `simulate`.
"""

from importlib.metadata import version

import pytest
import torch
from packaging.version import Version

import tl_devicefix
from tl_devicefix.demo import CHECKPOINT

try:
    from transformer_lens import HookedTransformer

    load = HookedTransformer.from_pretrained
except ImportError:  # TransformerLens 4
    from transformer_lens.model_bridge import TransformerBridge

    load = TransformerBridge.boot_transformers

MODEL = str(CHECKPOINT)
CLEAN = "Emma likes red . Bob likes blue . Emma likes"
CORRUPTED = "Bob likes red . Emma likes blue . Emma likes"
RESID = "blocks.6.hook_resid_pre"  # block 6 of 8 runs on the fourth device

fuses = pytest.mark.skipif(
    Version(version("transformer_lens")) < Version("3.8"),
    reason="fuse_blocks needs TransformerLens 3.8 or later",
)


@pytest.fixture(scope="module", autouse=True)
def four_devices():
    with tl_devicefix.simulate(4):
        yield


@pytest.fixture(scope="module")
def model(four_devices):
    return load(MODEL, n_devices=4)


@pytest.fixture(scope="module")
def one_device(four_devices):
    """The same model on the CPU."""
    return load(MODEL, device="cpu")


@pytest.fixture
def clean(model):
    return model.to_tokens(CLEAN)  # [batch, pos]


def steer(resid, hook):
    return resid + 1


def test_n_devices_4_spreads_blocks_in_order(model):
    where = [str(model.placement.device_of(f"blocks.{layer}")) for layer in range(8)]
    assert where == ["sim:0", "sim:0", "sim:1", "sim:1", "sim:2", "sim:2", "sim:3", "sim:3"]


def test_a_printed_placement_shows_each_devices_blocks(model):
    home, *others = str(model.placement).splitlines()[1:5]
    assert home.startswith("sim:0 (home)")
    assert [row.split()[:2] for row in others] == [
        ["sim:1", "blocks.2-3"],
        ["sim:2", "blocks.4-5"],
        ["sim:3", "blocks.6-7"],
    ]


def test_logits_are_at_home_and_equal_one_devices(model, one_device, clean):
    logits = model(clean)  # [batch, pos, d_vocab]
    assert logits.device == torch.device("sim:0")
    torch.testing.assert_close(logits.cpu(), one_device(CLEAN), rtol=1e-4, atol=1e-4)
    assert model.to_string(logits[0, -1].argmax()).strip() == "red"


def test_a_cache_is_read_at_home(model, one_device, clean):
    _, cache = model.run_with_cache(clean)
    _, expected = one_device.run_with_cache(CLEAN)
    assert cache["resid_post", 7].device == torch.device("sim:0")
    torch.testing.assert_close(
        cache["resid_post", 7].cpu(), expected["resid_post", 7], rtol=1e-4, atol=1e-4
    )


def test_a_hook_runs_on_its_blocks_device(model, one_device, clean):
    seen = []

    def look(resid, hook):
        seen.append(str(resid.device))
        return steer(resid, hook)

    steered = model.run_with_hooks(clean, fwd_hooks=[(RESID, look)])
    assert seen == ["sim:3"]
    expected = one_device.run_with_hooks(CLEAN, fwd_hooks=[(RESID, steer)])
    torch.testing.assert_close(steered.cpu(), expected, rtol=1e-4, atol=1e-4)


def test_a_hook_may_add_a_cached_activation_from_home(model, clean):
    _, cache = model.run_with_cache(clean)

    def patch(resid, hook):
        resid[:, :6] = cache[hook.name][:, :6]  # from home, into the hook's device
        return resid

    patched = model.run_with_hooks(model.to_tokens(CORRUPTED), fwd_hooks=[(RESID, patch)])
    assert torch.isfinite(patched).all()


def test_gradients_lie_beside_their_weights(model, one_device, clean):
    for each, tokens in ((model, clean), (one_device, clean.cpu())):
        each.zero_grad()
        each(tokens, return_type="loss").backward()
    expected = dict(one_device.named_parameters())
    for name, weight in model.named_parameters():
        assert weight.grad.device == weight.device
        torch.testing.assert_close(weight.grad.cpu(), expected[name].grad, rtol=1e-4, atol=1e-4)


def test_generate_continues_a_prompt(model, one_device):
    options = {"max_new_tokens": 2, "do_sample": False, "verbose": False}
    assert model.generate(CLEAN, **options) == one_device.generate(CLEAN, **options)


def test_stacked_weights_are_gathered_at_home(model, one_device):
    assert model.W_Q.device == torch.device("sim:0")  # [layer, head, d_model, d_head]
    torch.testing.assert_close(model.W_Q.cpu(), one_device.W_Q)
    with tl_devicefix.gather_on("cpu"):
        assert model.W_Q.device == torch.device("cpu")


def test_mix_devices_adds_weights_of_two_blocks(model):
    with tl_devicefix.mix_devices():
        both = model.blocks[0].attn.W_O + model.blocks[7].attn.W_O
    assert both.device == torch.device("sim:0")


def test_pipeline_map_gives_what_a_loop_gives(model, clean):
    batches = [clean.roll(shift, 1) for shift in range(4)]
    results = tl_devicefix.pipeline_map(model, lambda view, batch: view(batch), batches)
    with torch.no_grad():
        assert all(torch.equal(model(batch), result) for batch, result in zip(batches, results))


def test_sweep_runs_many_hooks_on_the_same_tokens(model, clean):
    runs = [[(f"blocks.{layer}.hook_resid_pre", steer)] for layer in range(8)]
    with torch.no_grad():
        for hooks, logits in zip(runs, tl_devicefix.sweep(model, clean, runs)):
            expected = model.run_with_hooks(clean, fwd_hooks=hooks)
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_saved_activations_are_read_like_tensors(model, clean, tmp_path):
    tl_devicefix.save_activations(
        model, [clean, clean.flip(1)], [RESID], directory=tmp_path / "out", progress=False
    )
    saved = tl_devicefix.load_activations(tmp_path / "out")[RESID]  # [example, pos, d_model]
    _, cache = model.run_with_cache(clean, names_filter=RESID)
    torch.testing.assert_close(saved[0:1], cache[RESID].cpu(), rtol=1e-4, atol=1e-4)


def test_offloaded_blocks_live_in_cpu_memory(one_device):
    model = load(MODEL, device_map={"": 0, "blocks.4": "cpu", "blocks.5": "cpu"})
    assert str(model.placement.stored_on("blocks.4")) == "cpu"
    assert str(model.placement.device_of("blocks.4")) == "sim:0"
    torch.testing.assert_close(model(CLEAN).cpu(), one_device(CLEAN), rtol=1e-4, atol=1e-4)


@fuses
def test_fused_blocks_run_hooks_until_unfused(one_device):
    model = load(MODEL, n_devices=4)
    tl_devicefix.fuse_blocks(model)
    assert set(tl_devicefix.report(model).values()) == {"fused"}
    hooks = [(RESID, steer)]
    steered = model.run_with_hooks(CLEAN, fwd_hooks=hooks)
    expected = one_device.run_with_hooks(CLEAN, fwd_hooks=hooks)
    torch.testing.assert_close(steered.cpu(), expected, rtol=1e-4, atol=1e-4)
    tl_devicefix.unfuse_blocks(model)
    assert set(tl_devicefix.report(model).values()) == {"not fused"}


def test_check_names_a_hook_that_was_left_behind(model):
    model.add_hook(RESID, steer)
    assert "blocks.6.hook_" in str(tl_devicefix.check(model))
    model.reset_hooks()
    model.zero_grad()
    assert str(tl_devicefix.check(model)) == "all is well"


def test_plan_shows_where_a_model_would_be(model):
    planned = tl_devicefix.plan(MODEL, n_devices=4)
    assert planned.device_of("blocks.7") == model.placement.device_of("blocks.7")


def test_estimate_says_whether_a_job_fits():
    job = {"batch_size": 8, "seq_len": 32, "cache": "resid_post"}
    assert tl_devicefix.estimate(MODEL, 4, max_memory="2MiB", **job).fits
    assert not tl_devicefix.estimate(MODEL, 4, max_memory="1MiB", **job).fits


def test_dry_run_tries_a_function_without_weights():
    dry = tl_devicefix.dry_run(MODEL, run=lambda model: model(CLEAN), n_devices=4)
    assert dry.error is None


def test_a_misspelt_public_name_is_suggested():
    with pytest.raises(AttributeError, match="'save_activation'; did you mean 'save_activations'"):
        _ = tl_devicefix.save_activation


def test_disable_undoes_every_patch():
    assert tl_devicefix.report().is_enabled
    with tl_devicefix.disabled():
        assert not tl_devicefix.report().is_enabled
    assert tl_devicefix.report().is_enabled

"""`dry_run` of a name, a HookedTransformer's or with TransformerLens 4 a Bridge's."""

import warnings

import pytest
import torch
from by_name import a_bridge_by_name, layers, peaks_of

from tl_devicefix import dry_run, simulate, sweep
from tl_devicefix.fusing.fused import is_fused
from tl_devicefix.monkeypatch.versions import has_hooked_transformer

TOKENS = torch.arange(18).reshape(2, 9) % 30 + 5
FOUR_LAYERS = layers(4, "n_layer")  # of gpt2
LLAMA_70B = "meta-llama/Llama-2-70b-hf"


def forward(model):
    with torch.no_grad():
        return model(TOKENS)


def keep_all(model):
    with torch.no_grad():
        return model.run_with_cache(TOKENS)


def generate(model):
    model.generate(TOKENS.to(model.cfg.device), max_new_tokens=3, stop_at_eos=False, verbose=False)


def backward(model):
    model(TOKENS, return_type="loss").backward()


def steer(model):
    vector = torch.ones(model.cfg.d_model, device=model.cfg.device)
    hook = ("blocks.4.hook_resid_post", lambda activation, hook: activation + vector)
    with torch.no_grad():
        return model.run_with_hooks(TOKENS, fwd_hooks=[hook])


def sweep_in_batches(model):
    runs = [[("blocks.2.hook_resid_pre", lambda activation, hook: activation * 2)]] * 4
    with torch.no_grad():
        return list(sweep(model, TOKENS.to(model.cfg.device), runs, batch_size=4))


def analyse(model):
    with torch.no_grad():
        _, cache = model.run_with_cache(TOKENS)
        return cache.accumulated_resid(apply_ln=True), cache.stack_head_results(), model.W_Q


def fold(bridge):
    """A Bridge's, which is booted before it is folded."""
    bridge.enable_compatibility_mode()
    return forward(bridge)


CASES = [
    ("llama", 1, sweep_in_batches),
    *(("llama", 3, job) for job in (generate, backward, steer)),
]
"""An architecture, over how many devices, and what is done with it."""
if has_hooked_transformer():
    CASES += [("llama", 3, analyse), ("gpt2", 1, keep_all), ("gemma-2", 3, keep_all)]
else:
    CASES += [(name, 3, fold) for name in ("llama", "gemma-2")]
    CASES += [("gpt2", 3, keep_all), ("mixtral", 2, keep_all)]


def n_transfers(transfers):
    """How many there are; a Bridge's without those of tokens.

    These accelerate takes by way of a device that it takes by chance.
    """
    least = 0 if has_hooked_transformer() else 2 * TOKENS.nbytes
    return sum(item.bytes > least for item in transfers)


@pytest.mark.parametrize(("name", "n_devices", "job"), CASES)
def test_dry_run_reports_the_memory_and_copies_of_the_real_job(
    name, n_devices, job, loaded, tokenizer
):
    with simulate(n_devices) as machine:
        model, config = loaded(name, n_devices)
        weights = [machine.memory_allocated(index) for index in range(n_devices)]
        machine.reset_transfers()
        peaks = peaks_of(machine, lambda: job(model))
        transfers = n_transfers(machine.transfers)

    dry = dry_run(config, job, n_devices, tokenizer=tokenizer)

    assert dry.runs, dry
    assert [item.weights for item in dry.devices] == pytest.approx(weights, rel=0.05)
    assert [item.peak for item in dry.devices] == pytest.approx(peaks, rel=0.05)
    assert n_transfers(dry.transfers) == transfers


def test_operation_on_two_devices_is_reported_with_its_line():
    def job(model):
        return model.blocks[0].attn.W_O[0] @ model.blocks[3].attn.W_Q[0]  # the line

    dry = dry_run("gpt2", job, n_devices=4, **FOUR_LAYERS)

    assert not dry.runs
    assert "sim:0 and sim:3" in str(dry.error)
    assert "test_dry_run.py" in str(dry.stopped_at)
    assert "# the line" in str(dry.stopped_at)
    assert "it stops at" in repr(dry)


def test_hook_that_mixes_devices_is_reported_with_its_module():
    elsewhere = []

    def job(model):
        elsewhere.append(torch.ones(model.cfg.d_model, device="cpu"))
        return model.run_with_hooks(
            TOKENS, fwd_hooks=[("blocks.3.hook_resid_post", lambda a, hook: a + elsewhere[0])]
        )

    dry = dry_run("gpt2", job, n_devices=4, **FOUR_LAYERS)

    assert "same device" in str(dry.error)
    assert "within blocks.3" in str(dry.stopped_at)
    assert "elsewhere[0]" in str(dry.stopped_at)


def test_outcome_says_what_to_do_about_a_text():
    text = dry_run("gpt2", lambda model: model("some text"), 2, **FOUR_LAYERS)
    assert str(text).endswith("pass tokenizer= to dry_run, or tokens instead of text")


def test_a_device_without_room_is_reported_with_the_module():
    def job(model):
        return model(torch.zeros(64, 1024, dtype=torch.long))

    dry = dry_run("gpt2", job, n_devices=2, memory="1GiB", **FOUR_LAYERS)

    assert isinstance(dry.error, torch.OutOfMemoryError)
    assert "within blocks." in str(dry.stopped_at)


def test_dry_run_refuses_weights_that_do_not_fit():
    with pytest.raises(ValueError, match=r"the weights do not fit: sim:0 would hold .* GiB"):
        dry_run(LLAMA_70B, forward, n_devices=4, memory="16GiB")


def test_peak_is_reported_with_the_module_where_it_was():
    def job(model):
        torch.set_grad_enabled(False)
        return model(torch.zeros(8, 256, dtype=torch.long))

    dry = dry_run("gpt2", job, n_devices=2, **FOUR_LAYERS)
    copies = dry_run("gpt2", lambda model: job(model).repeat(4, 1, 1), n_devices=2, **FOUR_LAYERS)

    assert torch.is_grad_enabled()  # as before
    assert dry.devices[0].module == "unembed"
    assert dry.devices[1].module.startswith("blocks.")
    assert copies.devices[0].module == "outside the model"
    assert "_original_component" not in repr(dry)


@pytest.mark.hooked
def test_dry_run_warns_of_a_job_above_max_memory():
    weights = dry_run("gpt2", forward, **FOUR_LAYERS).devices[0].weights
    limits = {0: weights + 1000}
    with pytest.warns(
        UserWarning, match=r"^device 0 \(home\) peaks at .*, above its max_memory of"
    ):
        assert dry_run("gpt2", forward, max_memory=limits, **FOUR_LAYERS).runs
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert dry_run("gpt2", forward, max_memory=limits, memory="10GiB", **FOUR_LAYERS).runs


def test_dry_run_swaps_offloaded_blocks_in():
    limits = {0: "1.5GiB", "cpu": "20GiB"}

    dry = dry_run("meta-llama/Llama-3.2-1B", forward, dtype=torch.bfloat16, max_memory=limits)

    assert dry.runs, dry
    components = dry.placement.components
    block = next(item.weights for item in components if item.name == "blocks.0")
    resident, peak = dry.devices[0].weights, dry.devices[0].peak
    assert resident + 2 * block < 1.5 * 2**30
    assert resident + 2 * block < peak < resident + 2.2 * block
    offloaded = sum(item.weights for item in components if item.offloaded)
    copied = sum(item.bytes for item in dry.transfers if item.source.type == "cpu")
    assert copied == offloaded + TOKENS.nbytes


def test_dry_run_fuses_blocks_on_request():
    fused = []
    run = lambda model: fused.append(is_fused(model.blocks[0]))  # noqa: E731
    for options in ({}, {"fuse_blocks": True}):
        dry_run("meta-llama/Llama-3.2-1B", run, **options)
    assert fused == [False, True]


def order(tensor):
    """The dimensions longer than 1, slowest first."""
    dims = [dim for dim in range(tensor.dim()) if tensor.shape[dim] > 1]
    return sorted(dims, key=tensor.stride, reverse=True)


@pytest.mark.hooked
@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral"])
def test_parameters_are_laid_out_as_loading_lays_them_out(name, load):
    """For what a forward allocates depends on it."""
    loaded = load(name, device="cpu")
    dry = dry_run(
        loaded.cfg, lambda model: {name: order(p) for name, p in model.named_parameters()}
    )
    assert dry.result == {name: order(p) for name, p in loaded.named_parameters()}


@pytest.mark.hooked
def test_an_alias_is_checked_by_its_official_name(hub, hf_models):
    hub.add("roneneldan/TinyStories-1M", hf_models("gpt-neo"))
    assert dry_run("tiny-stories-1M", forward, on_mismatch="refuse").runs


@pytest.mark.hooked
def test_dry_run_takes_a_subclass_and_a_device_map():
    from model_classes import HookedTransformer

    Mine = type("Mine", (HookedTransformer,), {})
    device_map = {"": 0, "blocks.3": 1}
    dry = dry_run("gpt2", type, n_devices=2, device_map=device_map, cls=Mine)
    assert dry.result is Mine
    assert str(dry.placement.device_of("blocks.3")) == "sim:1"


@a_bridge_by_name
def test_compatibility_mode_takes_little_more_than_the_weights():
    options = {"dtype": torch.bfloat16, "hf_config_overrides": {"num_hidden_layers": 4}}
    dry = dry_run("EleutherAI/pythia-1.4b", fold, 2, **options)
    assert dry.runs, dry
    largest = max(component.weights for component in dry.placement.components)
    for item in dry.devices:
        assert item.peak - item.weights < 4 * largest  # in float32, twice


@a_bridge_by_name
def test_dry_run_obeys_n_ctx_and_hf_config_overrides():
    options = {"n_ctx": 64, "hf_config_overrides": {"num_hidden_layers": 2}}
    dry = dry_run("EleutherAI/pythia-70m", lambda it: (it.cfg.n_ctx, it.cfg.n_layers), **options)
    assert dry.result == (64, 2)


@a_bridge_by_name
def test_a_local_checkpoint_brings_its_tokenizer(checkpoints):
    from model_classes import TransformerBridge

    path = str(checkpoints("llama"))
    dry = dry_run(path, lambda bridge: bridge("a b").shape[0], cls=TransformerBridge)
    assert dry.result == 1, dry

"""`sweep` on devices that run behind the host, as real ones do."""

import pytest
import torch
from comparison import assert_agrees
from hf_models import padded

import tl_devicefix
from racing import HOST

ON_TWO = {"": 0, "blocks": "cpu", "blocks.2": 1}


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def one_patch_each(home):
    """Yield runs, each with a patch on the first device that nobody else keeps."""
    for part in ("blocks.0", "blocks.3", "ln_final", "blocks.4", "ln_final", "blocks.2"):
        patches = [torch.full((1000,), 2.0, device=home)]

        def patch(activation, hook, patches=patches):
            patched = activation * patches.pop().mean()
            torch.zeros(1000, device=home)  # may get the memory of the patch
            return patched

        yield [(f"{part}.hook_{'scale' if part == 'ln_final' else 'resid_pre'}", patch)]


def in_turn(model, tokens, runs, **arguments):
    return [model.run_with_hooks(tokens, fwd_hooks=run, **arguments) for run in runs]


@pytest.mark.parametrize("where", [{"n_devices": 3}, {"device_map": ON_TWO}], ids=["split", "cpu"])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_a_sweep_on_async_devices_equals_a_loop(where, batch_size, machine, load, tokens):
    model, home = load("llama", **where), machine.devices[0]
    for arguments in (
        {},
        {"return_type": "both"},
        {"return_type": "loss", "loss_per_token": True},
        {"stop_at_layer": 3},
        {"attention_mask": padded(tokens.to(home))},
    ):
        for given in (tokens, tokens.to(home)):
            expected = in_turn(model, given, one_patch_each(home), **arguments)
            runs = one_patch_each(home)
            actual = tl_devicefix.sweep(model, given, runs, batch_size=batch_size, **arguments)
            assert_agrees(list(actual), expected, home, tolerance=0 if batch_size == 1 else 1e-5)


def took(machine, sim, run):
    """Return the time of the devices, if each operation takes one unit."""
    for device in machine.devices:
        sim.synchronize(device)
    start = HOST.ends
    run()
    for device in machine.devices:
        sim.synchronize(device)
    return HOST.ends - start


@pytest.mark.parametrize("return_type", ["logits", "loss"])
def test_runs_of_a_sweep_overlap_on_the_devices(return_type, machine, sim, load, tokens):
    """At best, 12 runs take 12 + 3 - 1 stages of three devices; a loop takes 12 * 3."""
    model = load("llama", 3)
    tokens = tokens.to(machine.devices[0])
    runs = [[("blocks.0.hook_resid_pre", lambda activation, hook: activation / 2)]] * 12
    arguments = {"return_type": return_type}
    loop = took(machine, sim, lambda: in_turn(model, tokens, runs, **arguments))
    swept = took(machine, sim, lambda: list(tl_devicefix.sweep(model, tokens, runs, **arguments)))
    print("RATIO", swept / loop)
    assert swept < 0.6 * loop

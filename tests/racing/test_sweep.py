"""`sweep` on devices that run behind the host, as real ones do."""

import pytest
import torch
from comparison import assert_agrees, assert_bit_equal
from hf_models import padded
from parameters import in_turn
from runs_of_users import looped

import tl_devicefix
from racing import HOST
from tl_devicefix.dispatch.scheduler import RunAhead

pytestmark = pytest.mark.usefixtures("no_grad")


def one_patch_each(home):
    """Yield runs, each with a patch on the first device that nobody else keeps."""
    for part in ("blocks.0", "ln_final", "blocks.4", "blocks.2"):
        patches = [torch.full((1000,), 2.0, device=home)]

        def patch(activation, hook, patches=patches):
            patched = activation * patches.pop().mean()
            torch.zeros(1000, device=home)  # may get the memory of the patch
            return patched

        yield [(f"{part}.hook_{'scale' if part == 'ln_final' else 'resid_pre'}", patch)]


WHERE = {
    "three devices": {"n_devices": 3},
    "offloaded": {"spread": "all but one of two devices"},
    "ends at home": {"device_map": {"": 0, "blocks.1": 1}},
}
ARGUMENTS = {
    "tokens": lambda tokens: (tokens.cpu(), {}),
    "text": lambda tokens: ("w5 w6 w7", {"return_type": "both"}),
    "a mask": lambda tokens: (tokens, {"attention_mask": padded(tokens), "stop_at_layer": 3}),
}


@pytest.mark.parametrize(("where", "arguments"), in_turn(WHERE, ARGUMENTS))
def test_a_sweep_on_async_devices_equals_a_loop(where, arguments, machine, load, tokens):
    model, home = load("llama", **WHERE[where]), machine.devices[0]
    given, arguments = ARGUMENTS[arguments](tokens.to(home))
    expected = looped(model, given, one_patch_each(home), **arguments)
    for size in (1, 3):
        runs = one_patch_each(home)
        actual = tl_devicefix.sweep(model, given, runs, batch_size=size, **arguments)
        assert_agrees(list(actual), expected, home, tolerance=0 if size == 1 else 1e-5)


def test_a_hook_runs_the_model_in_a_run_that_is_launched_ahead(machine, load, tokens):
    model = load("gpt2", device_map={"": 0, "blocks.4": 1})
    home, inner = machine.devices[0], []

    def hook(activation, hook):
        inner.append(model(tokens, stop_at_layer=1))

    runs = [[(f"blocks.{layer}.hook_resid_pre", hook)] for layer in (2, 3, 2)]
    expected = looped(model, tokens, runs)
    assert_bit_equal(list(tl_devicefix.sweep(model, tokens, runs)), expected)
    assert_agrees(inner, [inner[0]] * 6, home, tolerance=0)


def test_a_hook_may_return_a_buffer_that_it_keeps_across_runs(machine, shared, tokens):
    model = shared("gpt2", 3)
    buffers = {}

    def into_buffer(activation, hook):
        buffer = buffers.setdefault(hook.name, torch.empty_like(activation))
        return buffer.copy_(activation / 2)

    # The outputs of all blocks, so also of those before another device.
    runs = [[(lambda name: name.endswith("hook_resid_post"), into_buffer)]] * 4
    expected = looped(model, tokens, runs)
    assert_bit_equal(list(tl_devicefix.sweep(model, tokens, runs)), expected)


def test_results_before_an_error_come_first(machine, shared, tokens):
    def fail(activation, hook):
        raise KeyError(hook.name)

    point = "blocks.2.hook_resid_pre"
    runs = [[], [], [(point, fail)], []]
    results = tl_devicefix.sweep(shared("gpt2", 3), tokens, runs)
    assert_bit_equal(next(results), next(results))
    with pytest.raises(KeyError, match="from run 2 of the sweep"):
        next(results)


def test_the_end_of_a_run_waits_for_what_was_computed_before(machine):
    tripled = torch.ones(3, device=machine.devices[0]) * 3
    ahead = RunAhead(machine.devices[0], frozenset())
    with ahead:
        ahead.return_home()
        result = tripled + 1  # a RaceError if nothing orders it after the product
    ahead.join([result])
    assert result.tolist() == [4, 4, 4]


def test_runs_not_fetched_have_ended_once_a_sweep_is_closed(load, tokens):
    model = load("llama", 3)
    results = tl_devicefix.sweep(model, tokens, [[]] * 4)
    next(results)
    results.close()
    for weight in model.unembed.parameters():
        weight.mul_(2)  # a RaceError while a run reads it


class Scaled(torch.nn.Module):
    """A user's module that uses each of its factors once."""

    def __init__(self, module, factors):
        super().__init__()
        self.module, self.factors = module, factors

    def forward(self, x):
        return self.module(x) * self.factors.pop().mean()


def test_a_users_module_after_the_blocks_may_free_memory(machine, load, tokens):
    model, home = load("gpt2", 3), machine.devices[0]
    factors = []
    model.unembed = Scaled(model.unembed, factors)

    def reuse(activation, hook):
        torch.zeros(1000, device=home)  # may get the memory of a factor

    runs = [[("blocks.0.hook_resid_pre", reuse)]] * 4
    factors += [torch.full((1000,), 2.0, device=home) for _ in range(4)]
    expected = looped(model, tokens, runs)
    factors += [torch.full((1000,), 2.0, device=home) for _ in range(4)]
    assert_bit_equal(list(tl_devicefix.sweep(model, tokens, runs)), expected)


def took(machine, sim, run):
    """Return the time of the devices, if each operation takes one unit."""
    for device in machine.devices:
        sim.synchronize(device)
    start = HOST.ends
    run()
    for device in machine.devices:
        sim.synchronize(device)
    return HOST.ends - start


STOPS = pytest.param({"stop_at_layer": 4}, marks=pytest.mark.full("with a loss runs, too"))


@pytest.mark.parametrize("arguments", [{"return_type": "loss"}, STOPS])
def test_runs_of_a_sweep_overlap_on_the_devices(arguments, machine, sim, shared, tokens):
    """At best, 4 runs take 4 + 3 - 1 stages of three devices; a loop takes 4 * 3."""
    model = shared("llama", 3)
    tokens = tokens.to(machine.devices[0])
    runs = [[("blocks.0.hook_resid_pre", lambda activation, hook: activation / 2)]] * 4
    loop = took(machine, sim, lambda: looped(model, tokens, runs, **arguments))
    swept = took(machine, sim, lambda: list(tl_devicefix.sweep(model, tokens, runs, **arguments)))
    assert swept < 0.65 * loop

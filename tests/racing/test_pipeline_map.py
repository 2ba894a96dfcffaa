"""`pipeline_map` on devices that run behind the host, as real ones do."""

import pytest
import torch
from comparison import assert_bit_equal

from tl_devicefix import pipeline_map


def test_pipelined_runs_on_async_devices_equal_a_loops_bits(machine, load, tokens):
    def run(view, batch):
        vector = torch.linspace(-1, 1, view.cfg.d_model, device=view.cfg.device)
        sums = []

        def wait(activation, hook):
            sums.append(activation.sum().item())

        steer = ("blocks.4.hook_resid_post", lambda activation, hook: activation + vector)
        with view.hooks(fwd_hooks=[("blocks.1.hook_resid_pre", wait), steer]):
            logits, cache = view.run_with_cache(batch, names_filter=lambda name: "resid" in name)
        return sums, logits, {name: cache[name] for name in cache}

    model, batches = load("llama", "all but one of two devices"), [tokens, tokens.roll(1, 1)]
    expected = [run(model, batch) for batch in batches]
    assert_bit_equal(list(pipeline_map(model, run, batches, 2)), expected)


def test_the_residual_stream_goes_on_streams_of_its_run(machine, sim, shared, tokens):
    """On the devices' default streams, a device would wait for a run that comes later."""
    with torch.no_grad():
        model = shared("gpt2", 2, folded=True)
        batches = [tokens.to(machine.devices[0]).roll(shift, 1) for shift in range(3)]
        machine.executor.copies.clear()
        list(pipeline_map(model, lambda view, batch: view(batch), batches))
    default = {*map(sim.current_stream, machine.devices)}
    assert sum(stream not in default for stream in machine.executor.copies) >= 2 * len(batches)


@pytest.mark.hooked
def test_cache_moved_to_its_blocks_is_read_before_it_is_freed(machine, load, tokens):
    from kinds import new_kv_cache  # here, because it needs a HookedTransformer

    def run(view, batch):
        cache = new_kv_cache(view, len(batch))
        view(batch, past_kv_cache=cache)
        for entry in cache.entries:  # the next forward moves them, and drops those at home
            entry.past_keys = entry.past_keys.to(machine.devices[0])
        return view(batch, past_kv_cache=cache)

    model, batches = load("llama", 2), [tokens, tokens.roll(1, 1)]
    with torch.no_grad():
        expected = [run(model, batch) for batch in batches]
        assert_bit_equal(list(pipeline_map(model, run, batches, 2)), expected)


@pytest.mark.hooked
def test_mask_edited_between_blocks_is_sent_after_the_edit(machine, load, tokens):
    def run(view, batch):
        mask = torch.ones_like(batch, device=machine.devices[0])

        def edit(activation, hook):  # on blocks.2 to 3, which have the mask already
            mask[0, 4] = 0

        with view.hooks([("blocks.2.hook_resid_pre", edit)]):
            return view(batch, attention_mask=mask)

    model, batches = load("llama", 3), [tokens, tokens.roll(1, 1)]
    expected = [run(model, batch) for batch in batches]
    assert_bit_equal(list(pipeline_map(model, run, batches, 2)), expected)


def test_run_has_the_callers_current_device(sim, shared):
    model = shared("gpt2", 2, folded=True)
    with sim.stream(sim.Stream("sim:2")):
        result = list(pipeline_map(model, lambda view, item: sim.current_device(), range(3)))
    assert result == [2, 2, 2]

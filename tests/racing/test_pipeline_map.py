"""`pipeline_map` on devices that run behind the host, as real ones do."""

import pytest
import torch
from comparison import assert_bit_equal
from runs_of_users import (
    a_number_that_is_waited_for,
    some_of_the_cache,
    steered_at_a_block_elsewhere,
)

from tl_devicefix import pipeline_map

ON_TWO = {"": 0, "blocks": "cpu", "blocks.2": 1}
FORWARDS = a_number_that_is_waited_for, some_of_the_cache, steered_at_a_block_elsewhere


@pytest.mark.parametrize(
    ("where", "runs"),
    [({"n_devices": 2}, FORWARDS), ({"device_map": ON_TWO}, FORWARDS)],
)
def test_pipelined_runs_on_async_devices_equal_a_loops_bits(where, runs, machine, load, tokens):
    def all_of_them(model, batch):
        return [run(model, batch) for run in runs]

    model, batches = load("llama", **where), [tokens, tokens.roll(1, 1)]
    expected = [all_of_them(model, batch) for batch in batches]
    assert_bit_equal(list(pipeline_map(model, all_of_them, batches, 2)), expected)


def test_the_residual_stream_goes_on_streams_of_its_run(machine, sim, load, tokens):
    """On the devices' default streams, a device would wait for a run that comes later."""
    with torch.no_grad():
        model = load("gpt2", 2, folded=True)
        batches = [tokens.to(machine.devices[0]).roll(shift, 1) for shift in range(3)]
        machine.executor.copies.clear()
        list(pipeline_map(model, lambda view, batch: view(batch), batches))
    default = {*map(sim.current_stream, machine.devices)}
    assert sum(stream not in default for stream in machine.executor.copies) >= 2 * len(batches)


def test_run_has_the_callers_current_device(sim, load):
    model = load("gpt2", 2, folded=True)
    with sim.stream(sim.Stream("sim:2")):
        result = list(pipeline_map(model, lambda view, item: sim.current_device(), range(3)))
    assert result == [2, 2, 2]

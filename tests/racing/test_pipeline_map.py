"""`pipeline_map` on devices that run behind the host, as real ones do."""

import pytest
import torch
from comparison import assert_bit_equal
from runs_of_users import (
    a_number_that_is_waited_for,
    gradients_of_weights,
    some_of_the_cache,
    steered_at_a_block_elsewhere,
)

from tl_devicefix import pipeline_map

ON_TWO = {"": 0, "blocks": "cpu", "blocks.2": 1}


@pytest.mark.parametrize(
    ("where", "runs"),
    [
        (2, (a_number_that_is_waited_for, some_of_the_cache, steered_at_a_block_elsewhere)),
        (ON_TWO, (gradients_of_weights,)),
    ],
    ids=["over devices", "offloaded"],
)
def test_pipelined_runs_on_async_devices_equal_a_loops_bits(where, runs, machine, load, tokens):
    if where == 2:
        model = load("gpt2", where, folded=True).to(torch.bfloat16)
    else:
        model = load("llama", device_map=where)
    batches = [tokens.roll(shift, 1) for shift in range(2)]

    def all_of_them(model, batch):
        return [run(model, batch) for run in runs]

    expected = [all_of_them(model, batch) for batch in batches]
    assert_bit_equal(list(pipeline_map(model, all_of_them, batches, 2)), expected)


def test_the_residual_stream_goes_on_streams_of_its_run(machine, load, tokens):
    """On the devices' default streams, a device would wait for a run that comes later."""
    with torch.no_grad():
        model = load("gpt2", 2, folded=True)
        batches = [tokens.to(machine.devices[0]).roll(shift, 1) for shift in range(3)]
        machine.executor.launcher.copies.clear()
        machine.reset_transfers()
        list(pipeline_map(model, lambda view, batch: view(batch), batches))
    streams = [number for _, number in machine.executor.launcher.copies]
    of_host = [copy for copy in machine.transfers if "cpu" in (copy.source.type, copy.target.type)]
    assert len(streams) >= 2 * len(batches) + len(of_host)
    assert streams.count(0) <= len(of_host)


def test_run_has_the_callers_current_device(machine, load):
    model, module = load("gpt2", 2, folded=True), torch.get_device_module("sim")
    module.set_device(2)
    try:
        result = list(pipeline_map(model, lambda view, item: module.current_device(), range(3)))
    finally:
        module.set_device(0)
    assert result == [2, 2, 2]

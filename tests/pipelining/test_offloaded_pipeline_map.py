"""Pipelined runs of a model whose blocks live in host memory: each copies them for itself."""

import pytest
import torch
from comparison import assert_bit_equal, in_use
from offloads import (
    HOST,
    assert_at_rest,
    assert_two_blocks_at_a_time,
    offloaded_blocks,
    weights_of,
)
from runs_of_users import LAST, generated, logits

from tl_devicefix import pipeline_map


@pytest.fixture
def model(shared):
    """All blocks are offloaded but one, which lives on a second device."""
    return shared("llama", "all but one of two devices")


@pytest.fixture
def batches(tokens):
    """Four batches of tokens, each different."""
    return [tokens.roll(shift, 1) for shift in range(4)]


def forwards_within_forwards(model, batch):
    inner = []

    def again(activation, hook):
        if not inner:
            inner.append(None)
            inner[0] = model(batch.flip(0), stop_at_layer=4)
            return activation + inner[0].mean().to(activation.device)
        return activation

    return model.run_with_hooks(batch, fwd_hooks=[("blocks.1.hook_resid_mid", again)]), inner


@pytest.mark.parametrize("run", [generated, forwards_within_forwards])
def test_pipelined_offloaded_runs_equal_a_loops_bit_for_bit(machine, model, batches, run):
    expected = [run(model, batch) for batch in batches[:2]]
    assert_bit_equal(list(pipeline_map(model, run, batches[:2], 2)), expected)
    assert_at_rest(model)


def test_each_run_copies_each_block_once(machine, shared, batches):
    model = shared("llama", "all of one device")
    batches = [batch.to(model.cfg.device) for batch in batches]
    machine.reset_transfers()
    with torch.no_grad():
        assert sum(1 for _ in pipeline_map(model, logits, batches, 3)) == len(batches)
    sent = [t.bytes for t in machine.transfers if t.source == HOST and t.target != HOST]
    weights = sum(weights_of(model.blocks[layer]) for layer in offloaded_blocks(model))
    assert sum(sent) == len(batches) * weights


def test_two_blocks_at_a_time_are_on_a_device(machine, model, tokens):
    one_token = tokens[:1, :1].to(machine.devices[0])  # whose activations are less than any block
    runs = lambda: sum(1 for _ in pipeline_map(model, logits, [one_token] * 6, 3))  # noqa: E731
    assert_two_blocks_at_a_time(model, machine, runs, activations=0.75)


def test_unfinished_runs_leave_no_memory_on_the_device(machine, model, batches):
    model(batches[0])
    before = in_use(machine)

    def run(view, item):
        number, batch = item

        def fail(activation, hook):
            if number == 2:
                raise LookupError

        view.run_with_hooks(batch, fwd_hooks=[(LAST, fail)])
        return number

    results = pipeline_map(model, run, enumerate(batches), 3)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(LookupError):
        next(results)
    del results

    assert in_use(machine) == before
    assert_at_rest(model)
    assert_bit_equal(list(pipeline_map(model, logits, batches[:2], 2)), [*map(model, batches[:2])])

"""Two offloaded blocks at a time are on a device; each is copied once a forward, in time."""

import pytest
import torch
from comparison import in_use
from kinds import home_of
from offloads import HOST, assert_two_blocks_at_a_time, offloaded_blocks, weights_of

from tl_devicefix.placement.fitting import working_room

pytestmark = pytest.mark.hooked


@pytest.mark.parametrize(
    ("kind", "spread"), [("gpt2", "all of one device"), ("llama", "some of three devices")]
)
def test_forward_copies_each_offloaded_blocks_weights_once(model, at_home, machine):
    for end in (3, model.cfg.n_layers):
        away = [model.blocks[layer] for layer in offloaded_blocks(model) if layer < end]
        machine.reset_transfers()
        model(at_home, stop_at_layer=end)
        copied = [t for t in machine.transfers if t.source == HOST]
        assert sum(t.bytes for t in copied) == sum(weights_of(block) for block in away)
        assert len(copied) == sum(len(list(block.parameters())) for block in away)


@pytest.mark.parametrize("spread", ["all of one device"])
def test_the_next_block_is_on_its_way_before_a_block_computes(model, at_home, machine):
    n_layers, n_weights = model.cfg.n_layers, len(list(model.blocks[0].parameters()))
    machine.reset_transfers()
    sent = []

    def note(activation, hook):
        sent.append(len(machine.transfers) // n_weights)

    hooks = [(lambda name: name.endswith(("resid_pre", "resid_post")), note)]
    model.run_with_hooks(at_home, fwd_hooks=hooks)
    # Before block k computes, k + 1 is sent for; k + 2 is not before k has computed.
    assert sent[::2] == sent[1::2] == [min(k + 2, n_layers) for k in range(n_layers)]


@pytest.mark.parametrize("spread", ["all of one device", "some of three devices"])
def test_two_offloaded_blocks_at_a_time_are_on_a_device(model, tokens, machine):
    one_token = tokens[:1, :1].to(home_of(model))  # whose activations are less than any block
    assert_two_blocks_at_a_time(model, machine, lambda: model(one_token), activations=0.5)


@pytest.mark.parametrize("spread", ["all of one device"])
def test_a_backward_brings_back_less_than_two_blocks_at_a_time(model, tokens, machine):
    logits = model(tokens[:1, :1].to(home_of(model)))
    gradients = sum(p.nbytes for p in model.parameters() if p.device != HOST)
    n_bytes = machine.memory_allocated(0) + gradients
    machine.reset_peak_memory_stats(0)
    logits.sum().backward()
    block = weights_of(model.blocks[0])
    assert block / 8 < machine.max_memory_allocated(0) - n_bytes < 2 * block


def test_loading_takes_no_more_memory_than_running_plus_folding(load, machine):
    before = in_use(machine)
    for device in machine.devices:
        machine.reset_peak_memory_stats(device)
    placement = load("llama", "some of three devices").placement
    folding = working_room(placement, torch.float32)
    for device in placement.devices:
        taken = machine.max_memory_allocated(device) - before[device.index]
        assert taken <= placement.bytes_on(device) + folding

"""What runs again during backward finds an offloaded block's weights on the device."""

import gc

import pytest
import torch
from comparison import assert_agrees
from offloads import assert_at_rest
from parameters import in_turn
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.utils.checkpoint import checkpoint

import tl_devicefix


class Recomputed(nn.Module):
    """Runs a part under `checkpoint`."""

    def __init__(self, part, use_reentrant):
        super().__init__()
        self.part, self.use_reentrant = part, use_reentrant

    def forward(self, *args, **kwargs):
        return checkpoint(self.part, *args, use_reentrant=self.use_reentrant, **kwargs)


def replace_mlps(make):
    """A change of a model that puts something around each MLP."""

    def change(model):
        for block in model.blocks:
            block.mlp = make(block.mlp)

    return change


def checkpoint_blocks(model):
    blocks = list(model.blocks)
    apply_activation_checkpointing(model, check_fn=lambda module: module in blocks)


def checkpoint_layers(use_reentrant):
    """transformers' own checkpointing of a Bridge's layers."""
    options = {"use_reentrant": use_reentrant}
    return lambda model: model.train().original_model.gradient_checkpointing_enable(options)


def call_in_backward_hooks(model):
    """Double a gradient where a part runs again without an error."""
    for block in model.blocks:
        block.mlp.register_full_backward_hook(
            lambda mlp, _, of_outputs: (2 * torch.ones_like(mlp(of_outputs[0])),)
        )


OF_HOOKED = {
    "a part": replace_mlps(lambda mlp: Recomputed(mlp, use_reentrant=False)),
    "a part, re-entrant": replace_mlps(lambda mlp: Recomputed(mlp, use_reentrant=True)),
    "blocks": checkpoint_blocks,
    "backward hooks": call_in_backward_hooks,
}
OF_BRIDGE = {
    "layers": checkpoint_layers(use_reentrant=False),
    "layers, re-entrant": checkpoint_layers(use_reentrant=True),
    "backward hooks": call_in_backward_hooks,
}


@pytest.mark.fuses
@pytest.mark.hooked
def test_a_forward_put_into_an_offloaded_fused_block_runs(load, machine, tokens):
    model = load("llama", device_map={"": 0, "blocks.1": "cpu"})
    model.blocks[1].mlp.forward = lambda x: 0 * x
    model.setup()
    expected = model(tokens)
    tl_devicefix.fuse_blocks(model)
    assert_agrees(model(tokens), expected)


def gradients(model, tokens):
    model(tokens, return_type="loss").backward()
    return {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(change, model, reference, tokens):
    for variant in (model, reference):
        variant.requires_grad_()
        change(variant)
    assert_agrees(gradients(model, tokens), gradients(reference, tokens))
    assert_at_rest(model)


@pytest.mark.hooked
@pytest.mark.parametrize("change", OF_HOOKED.values(), ids=OF_HOOKED)
def test_a_part_of_an_offloaded_block_is_recomputed(change, load, reference, tokens):
    assert_same_gradients(change, load("llama", "some of one device"), reference, tokens)


@pytest.mark.fuses
@pytest.mark.hooked
def test_a_part_of_a_fused_offloaded_block_is_recomputed(load, reference, tokens):
    model = load("llama", "some of one device", fuse_blocks=True)
    assert_same_gradients(OF_HOOKED["a part"], model, reference, tokens)


@pytest.mark.bridge
@pytest.mark.parametrize(("change", "fused"), in_turn(OF_BRIDGE, [False, True]))
def test_layers_of_an_offloaded_bridge_are_recomputed(change, fused, load, reference, tokens):
    model = load("llama", "some of one device", fuse_blocks=fused)
    assert_same_gradients(OF_BRIDGE[change], model, reference, tokens)


def kept(model, machine, tokens):
    """Bytes on the device that a loss keeps, and the loss."""
    gc.collect()
    before = machine.memory_allocated(0)
    loss = model(tokens, return_type="loss")
    gc.collect()
    return machine.memory_allocated(0) - before, loss


@pytest.mark.hooked
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_graph_does_not_keep_swapped_in_weights(kind, shared, load, machine, tokens):
    """But for GPT-2's W_Q, W_K and W_V, of which TransformerLens makes copies on any device."""
    expected, _ = kept(load(kind, device_map=0), machine, tokens)
    assert kept(shared(kind, "all of one device"), machine, tokens)[0] == expected


@pytest.mark.hooked
def test_checkpointed_offloaded_blocks_keep_little(load, machine, tokens):
    model = load("llama", "all of one device")
    without, _ = kept(model, machine, tokens)
    checkpoint_blocks(model)
    assert kept(model, machine, tokens)[0] < without / 3


@pytest.mark.hooked
@pytest.mark.parametrize("spread", ["all of one device"])
def test_save_on_cpu_acts_in_offloaded_blocks(model, reference, machine, tokens):
    without, _ = kept(model, machine, tokens)
    with save_on_cpu():
        n_bytes, loss = kept(model, machine, tokens)
    assert n_bytes < without / 3
    loss.backward()
    assert_agrees(
        {name: p.grad.cpu() for name, p in model.named_parameters()}, gradients(reference, tokens)
    )

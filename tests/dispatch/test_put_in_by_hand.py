"""What is put into a block by hand from another device is brought to the block, with a warning."""

import contextlib
import copy
import pickle
import warnings

import pytest
import torch
from comparison import assert_agrees
from devices import device
from torch import nn

from tl_devicefix.checking import check


def weight(model, layer):
    """Where a block's MLP holds a weight, and the weight's name."""
    module = next(module for module in model.blocks[layer].mlp.modules() if module._parameters)
    return module._parameters, next(iter(module._parameters))


def a_parameter(model):
    (held, name), (first, _) = weight(model, 4), weight(model, 0)
    held[name] = nn.Parameter(2 * first[name].detach())


def data(model):
    (held, name), (first, _) = weight(model, 4), weight(model, 0)
    held[name].data = 2 * first[name].data


def a_module(model):
    model.blocks[4].mlp = copy.deepcopy(model.blocks[0].mlp)


def a_module_that_two_blocks_share(model):
    model.blocks[4].mlp = model.blocks[0].mlp


def a_parameter_that_two_blocks_share(model):
    (held, name), (first, _) = weight(model, 4), weight(model, 0)
    held[name] = first[name]


def masks(model):
    for block in model.blocks:
        block.attn.mask = model.blocks[-1].attn.mask


SHARED = a_parameter_that_two_blocks_share, a_module_that_two_blocks_share
# A Bridge has masks at home, and accelerate's hooks go with its modules, to the device that these
# come from.
OF_HOOKED = [
    pytest.param(put, marks=pytest.mark.hooked)
    for put in (a_module, masks, a_module_that_two_blocks_share)
]


@contextlib.contextmanager
def no_warning():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(assigned from another device|are shared)")
        yield


def logits_and_gradients(model, tokens):
    model.zero_grad()
    loss = model(tokens, return_type="loss")
    loss.backward()
    weights = (weight(model, layer) for layer in (0, 3, 4))
    return [loss, *(held[name].grad for held, name in weights)]


@pytest.mark.fails_unpatched
@pytest.mark.parametrize("put", [a_parameter, data, a_parameter_that_two_blocks_share, *OF_HOOKED])
def test_part_put_in_from_another_device_runs_with_one_warning(put, load, on_one, machine, tokens):
    model, reference = load("llama"), on_one("llama")
    put(model)
    put(reference)
    expected = logits_and_gradients(reference, tokens)
    how = "are shared" if put in SHARED else "assigned from another device"

    with pytest.warns(UserWarning, match=how) as warned:
        actual = logits_and_gradients(model, tokens.to(device(0)))
    assert len([warning for warning in warned if how in str(warning.message)]) == 1
    assert_agrees(actual, expected)
    with no_warning():
        assert_agrees(model(tokens.to(device(0)), return_type="loss"), expected[0])


def test_forward_moves_the_same_parameter_with_its_grad(load, machine, tokens):
    model = load("llama")
    data(model)
    held, name = weight(model, 4)
    parameter = held[name]
    parameter.grad = torch.ones_like(parameter)
    assert "device" in {finding.kind for finding in check(model).findings}

    with pytest.warns(UserWarning, match="assigned from another device"):
        model(tokens.to(device(0)))

    assert held[name] is parameter
    assert parameter.device == parameter.grad.device == torch.device(device(3))
    assert parameter.grad.sum() == parameter.numel()
    assert "device" not in {finding.kind for finding in check(model).findings}


@pytest.mark.hooked
def test_tensors_put_into_an_offloaded_block_move_to_the_host(load, on_one, tokens):
    model = load("llama", device_map={"": 0, "blocks.3": "cpu", "blocks.4": 3})
    reference = on_one("llama")
    for owner in (model, reference):
        owner.blocks[3].mlp.W_in.data = 2 * owner.blocks[4].mlp.W_in.data
        owner.blocks[3].attn.mask = owner.blocks[4].attn.mask
        owner.blocks[4].mlp.W_out = nn.Parameter(2 * owner.blocks[3].mlp.W_out.detach())

    with pytest.warns(UserWarning, match="assigned from another device"):
        actual = model(tokens)

    assert_agrees(actual, reference(tokens))
    for layer, tensors, where in (
        (3, "parameters", "cpu"),
        (3, "buffers", device(0)),
        (4, "parameters", device(3)),
    ):
        on = {str(tensor.device) for tensor in getattr(model.blocks[layer], tensors)()}
        assert on == {where}


@pytest.mark.hooked
def test_attention_without_an_alibi_table_runs(load, machine, tokens):
    class Zero(nn.Module):
        def forward(self, query_input, *args, **kwargs):
            return torch.zeros_like(query_input)

    model = load("bloom", 2)
    model.blocks[1].attn = Zero()
    model.setup()
    assert model(tokens).isfinite().all()


@pytest.mark.hooked
def test_a_model_without_its_last_blocks_runs(load, machine, tokens):
    model = load("gpt2", 2)
    expected = model(tokens, stop_at_layer=3)
    model.blocks = model.blocks[:3]
    model.setup()
    assert_agrees(model(tokens, stop_at_layer=3), expected)


def test_untouched_model_and_its_copy_warn_of_nothing(load, machine, tokens):
    model = load("llama")
    with no_warning():
        model(tokens.to(device(0)))
        copy.deepcopy(model)(tokens.to(device(0)))
    assert pickle.dumps(model.blocks[4]._forward_pre_hooks)

"""A model with offloaded blocks gives what a model on one device gives."""

import contextlib
import functools
from types import SimpleNamespace

import pytest
import torch
from architectures import NO_PROCESSING
from comparison import assert_agrees, assert_same_weights, in_use
from kinds import home_of
from offloads import HOST, assert_at_rest, weights_of

import tl_devicefix
from tl_devicefix.offload import BlockCopy, Place, PrefetchedWeight, keeping_on_host

pytestmark = pytest.mark.hooked


@pytest.mark.parametrize("spread", ["some of three devices"])
def test_analyses_read_weights_and_caches_at_home(model, reference, tokens):
    _, cache = model.run_with_cache(tokens)
    _, expected = reference.run_with_cache(tokens)

    for read in (
        lambda model, cache: [model.W_Q, model.W_out, model.b_O],
        lambda model, cache: model.accumulated_bias(4),
        lambda model, cache: cache.stack_head_results(),
        lambda model, cache: cache.get_full_resid_decomposition(expand_neurons=False),
    ):
        assert_agrees(read(model, cache), read(reference, expected), home_of(model))
    for name, activation in cache.cache_dict.stored().items():
        if name.endswith("hook_result"):
            assert activation.device == model.placement.device_of(name)
    assert model.blocks[1].attn.W_Q.device == HOST
    with tl_devicefix.gather_on("cpu"):
        assert_agrees(model.W_in, reference.W_in, HOST)


@pytest.mark.parametrize("spread", ["some of three devices"])
def test_hooks_may_use_weights_of_any_offloaded_block(model, reference, tokens):
    are_together = set()

    def steered(model):
        def steer(activation, hook):
            are_together.add(model.blocks[4].attn.W_Q.device == activation.device)
            return activation + model.blocks[1].mlp.W_out.sum(0) + model.blocks[4].mlp.W_out.sum(0)

        return model.run_with_hooks(tokens, fwd_hooks=[("blocks.4.hook_resid_mid", steer)])

    assert_agrees(steered(model), steered(reference), home_of(model))
    assert are_together == {True}


@pytest.mark.parametrize(
    ("spread", "error"),
    [("all of one device", ValueError), ("some of three devices", KeyboardInterrupt)],
)
def test_hook_that_raises_leaves_no_copies_of_offloaded_blocks(
    error, model, reference, tokens, machine
):
    def fail(activation, hook):
        raise error("as it was told")

    before = in_use(machine)
    with torch.no_grad(), pytest.raises(error) as caught:
        model.run_with_hooks(tokens[:1, :1], fwd_hooks=[("blocks.3.attn.hook_z", fail)])
    assert_at_rest(model)
    # The error keeps activations of one token, which its traceback's frames hold.
    block = weights_of(model.blocks[3])
    assert all(now - then < block for now, then in zip(in_use(machine), before)), caught
    del caught
    assert in_use(machine) == before
    assert_agrees(model(tokens), reference(tokens), home_of(model))


def test_weights_changed_by_an_earlier_hook_stay_changed(load, reference, tokens):
    def result(model):
        with torch.no_grad():  # before a forward
            model.blocks[1].attn.W_O[:, :, 3] += 1
        model.blocks[2].attn.W_V.data *= 2

        @torch.no_grad()
        def halve(activation, hook):
            model.blocks[2].mlp.W_out.mul_(0.5)

        return model.run_with_hooks(tokens, fwd_hooks=[("blocks.1.hook_resid_post", halve)])

    model = load("llama", "all of one device")
    assert_agrees(result(model), result(reference))
    assert_at_rest(model)
    assert_same_weights(model, reference)
    assert_agrees(model(tokens), reference(tokens))


CHANGES = {
    "the parameter": lambda mlp, parameter: parameter.mul_(2),
    "the copy": lambda mlp, parameter: mlp.W_out.mul_(2),
    "the copy's data": lambda mlp, parameter: setattr(mlp.W_out, "data", mlp.W_out.data / 2),
}


@pytest.mark.parametrize("changed", CHANGES)
@torch.no_grad()
def test_a_hook_that_changes_a_weight_in_use_raises(changed, load, tokens):
    model = load("llama", "all of one device")
    mlp, before = model.blocks[2].mlp, model(tokens)
    parameter = mlp.W_out

    def change(activation, hook, error=None):
        # Wait for the copy to the device, which reads the parameter.
        torch.get_device_module(activation.device).synchronize(activation.device)
        CHANGES[changed](mlp, parameter)
        if error is not None:
            raise error

    refused = RuntimeError("W_out of an offloaded block was changed or frozen")
    for error in (None, ValueError("a user's error")):
        hook, expected = functools.partial(change, error=error), error or refused
        with pytest.raises(type(expected), match=str(expected)):
            model.run_with_hooks(tokens, fwd_hooks=[("blocks.2.hook_resid_pre", hook)])
        assert_at_rest(model)
    if changed == "the parameter":
        parameter.div_(4)
    assert_agrees(model(tokens), before)


def test_a_change_in_inference_mode_is_noticed():
    """Not simulated: there, inference mode is `no_grad`."""
    layer = torch.nn.Linear(3, 3)
    with torch.inference_mode():
        copies = BlockCopy([Place(layer, "weight", layer.weight)], HOST)
        copies.swap_in()
        layer.weight.mul_(2)
        assert copies.swap_out() == "weight"


def test_the_next_forward_undoes_what_an_interrupt_leaves(load, reference, tokens, monkeypatch):
    model, swap_in, swapped = load("llama", "all of one device"), PrefetchedWeight.swap_in, []

    def interrupted(weight):
        swap_in(weight)
        swapped.append(weight)
        if len(swapped) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(PrefetchedWeight, "swap_in", interrupted)
    with contextlib.suppress(KeyboardInterrupt):
        model(tokens)
    assert_agrees(model(tokens), reference(tokens))
    assert_at_rest(model)


@pytest.mark.parametrize("changed", ["activation", "weight"])
def test_backward_refuses_tensors_changed_since_the_forward(changed):
    """Not simulated: there, torch cannot pass on an error that Python raises in backward."""
    tensors = {name: torch.ones(3, requires_grad=True) for name in ("weight", "activation")}
    copy_there = tensors["weight"] * 1
    swapped_in = SimpleNamespace(weight=copy_there, host=tensors["weight"])
    with keeping_on_host([swapped_in]):
        result = (tensors["activation"] * copy_there).exp()
    assert_agrees(torch.autograd.grad(result.sum(), copy_there, retain_graph=True), [result])

    with torch.no_grad():
        {**tensors, "activation": result}[changed].mul_(2)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def test_processed_weights_of_offloaded_blocks_stay_on_the_host(load, reference, tokens):
    model = load("llama", "some of three devices", **NO_PROCESSING)
    model.process_weights_()
    assert_at_rest(model)
    assert_agrees(model(tokens).log_softmax(-1), reference(tokens).log_softmax(-1), home_of(model))
    before = model.placement
    model.move_model_modules_to_device()
    model.setup()
    assert model.placement == before
    assert_at_rest(model)

"""Autograd sees a block of another rank that is run whole as it sees its operations."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hf_models import N_LAYERS
from test_traffic import far_blocks, names

import tl_devicefix
from tl_devicefix.multihost.far_devices import FarDevices

FAR = N_LAYERS - 1


@pytest.fixture(autouse=True)
def _without_gradients(model: Any) -> Any:
    yield
    model.zero_grad()
    model.requires_grad_(True)


def loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens, return_type="loss")


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_backward_is_one_command_a_block(
    attention: str, model: Any, tokens: torch.Tensor, commands: list[Any]
) -> None:
    with tl_devicefix.set_attn_implementation(model, attention):
        loss(model, tokens).backward()

    assert (
        names(commands).count("record")
        == names(commands).count("backward")
        == len(far_blocks(model))
    )


def test_gradients_lie_as_their_weights_and_none_is_copied(
    model: Any, tokens: torch.Tensor, commands: list[Any]
) -> None:
    loss(model, tokens).backward()

    weights = list(model.blocks[FAR].parameters())
    assert not all(item.is_contiguous() for item in weights)
    assert [item.grad.stride() for item in weights] == [item.stride() for item in weights]
    operations = {item.arguments[0] for item in commands if item.name == "run"}
    assert not operations & {"aten::new_empty_strided", "aten::clone"}


def frozen(model: Any, tokens: torch.Tensor) -> None:
    model.requires_grad_(False)
    model.blocks[FAR].attn.W_Q.requires_grad_(True)
    loss(model, tokens).backward()


def inputs_alone(model: Any, tokens: torch.Tensor) -> None:
    loss(model, tokens).backward(inputs=[model.blocks[0].mlp.W_in])


def twice_through_one_graph(model: Any, tokens: torch.Tensor) -> None:
    result = loss(model, tokens)
    result.backward(retain_graph=True)
    result.backward()

    with pytest.raises(RuntimeError, match="second time"):
        result.backward()


def changed_in_place(model: Any, tokens: torch.Tensor) -> None:
    stream = model(tokens, stop_at_layer=N_LAYERS)
    stream += 1
    stream.square().sum().backward()


def with_a_bias_changed_before_the_backward(model: Any, tokens: torch.Tensor) -> None:
    result, bias = loss(model, tokens), model.blocks[FAR].attn.b_O.detach()
    before = bias.clone()
    bias.add_(1)
    result.backward()
    bias.copy_(before)


def with_a_hook(model: Any, tokens: torch.Tensor) -> None:
    """That block is run by its components, beside those that are run whole."""
    hooks = [(f"blocks.{FAR}.hook_resid_mid", lambda value, hook: value * 2)]
    model.run_with_hooks(tokens, return_type="loss", fwd_hooks=hooks).backward()


RUNS = [frozen, with_a_hook, inputs_alone, twice_through_one_graph, changed_in_place]
RUNS += [with_a_bias_changed_before_the_backward]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_gradients_are_those_of_one_cpu(run: Any, model: Any, tokens: torch.Tensor) -> None:
    alone = copy.deepcopy(model).to("cpu")
    for item in (model, alone):
        run(item, tokens)

    for weight, expected in zip(model.parameters(), alone.parameters()):
        assert (weight.grad is None) == (expected.grad is None)
        if expected.grad is not None:
            assert torch.equal(weight.grad.cpu(), expected.grad)


def test_gradients_of_gradients(
    model: Any, tokens: torch.Tensor, far: FarDevices, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeError, match=r"call init_hosts\(whole_blocks=False\)"):
        torch.autograd.grad(loss(model, tokens), model.W_E, create_graph=True)

    monkeypatch.setattr(far, "run_block", None)
    result = []
    for item in (model, copy.deepcopy(model).to("cpu")):
        weight = item.blocks[FAR].mlp.W_in
        (first,) = torch.autograd.grad(loss(item, tokens), weight, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), weight)
        result.append(second.cpu())

    torch.testing.assert_close(*result, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("frozen", [False, True])
def test_weights_that_were_changed_since_are_refused(
    frozen: bool, model: Any, tokens: torch.Tensor
) -> None:
    model.requires_grad_(not frozen)
    model.blocks[FAR].attn.W_Q.requires_grad_(True)
    result = loss(model, tokens)
    with torch.no_grad():
        model.blocks[FAR].mlp.W_in.mul_(1)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


def test_hooks_on_saved_tensors_see_those_of_each_operation(
    model: Any, tokens: torch.Tensor
) -> None:
    saved: list[Any] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss(model, tokens).backward()

    d_mlp = (*tokens.shape, model.cfg.d_mlp)
    assert saved.count(d_mlp) >= N_LAYERS

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
EQUAL = {"rtol": 0, "atol": 0}


@pytest.fixture
def alone(model: Any) -> Any:
    """The same on the CPU."""
    return copy.deepcopy(model).to("cpu")


@pytest.fixture(autouse=True)
def _without_gradients(model: Any) -> Any:
    yield
    model.zero_grad()
    model.requires_grad_(True)


def loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens, return_type="loss")


def far_gradients(model: Any) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.cpu() for p in model.blocks[FAR].parameters()]


def same(one: list[torch.Tensor | None], other: list[torch.Tensor | None]) -> None:
    for current, present in zip(one, other, strict=True):
        assert (current is None) == (present is None)
        if current is not None:
            torch.testing.assert_close(current, present, **EQUAL)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_backward_is_one_command_a_block(
    attention: str, model: Any, tokens: torch.Tensor, told: list[Any]
) -> None:
    with tl_devicefix.set_attn_implementation(model, attention):
        loss(model, tokens).backward()

    assert names(told).count("record") == names(told).count("backward") == len(far_blocks(model))


def test_gradients_lie_as_their_weights_and_none_is_copied(
    model: Any, tokens: torch.Tensor, told: list[Any]
) -> None:
    loss(model, tokens).backward()

    weights = list(model.blocks[FAR].parameters())
    assert not all(item.is_contiguous() for item in weights)
    assert [item.grad.stride() for item in weights] == [item.stride() for item in weights]
    operations = {item.arguments[0] for item in told if item.name == "run"}
    assert not operations & {"aten::new_empty_strided", "aten::clone"}


def test_frozen_weights_get_none(model: Any, alone: Any, tokens: torch.Tensor) -> None:
    for item in (model, alone):
        item.requires_grad_(False)
        item.blocks[FAR].attn.W_Q.requires_grad_(True)
        loss(item, tokens).backward()

    assert sum(item is not None for item in far_gradients(model)) == 1
    same(far_gradients(model), far_gradients(alone))


def test_inputs_alone(model: Any, alone: Any, tokens: torch.Tensor) -> None:
    for item in (model, alone):
        loss(item, tokens).backward(inputs=[item.blocks[0].mlp.W_in])

    assert far_gradients(model) == [None] * len(far_gradients(model))
    torch.testing.assert_close(
        model.blocks[0].mlp.W_in.grad.cpu(), alone.blocks[0].mlp.W_in.grad, **EQUAL
    )


def test_twice_through_one_graph(model: Any, alone: Any, tokens: torch.Tensor) -> None:
    for item in (model, alone):
        result = loss(item, tokens)
        result.backward(retain_graph=True)
        result.backward()

        with pytest.raises(RuntimeError, match="second time"):
            result.backward()
    same(far_gradients(model), far_gradients(alone))


def test_gradients_of_gradients(
    model: Any, alone: Any, tokens: torch.Tensor, far: FarDevices, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeError, match=r"call init_hosts\(whole_blocks=False\)"):
        torch.autograd.grad(loss(model, tokens), model.W_E, create_graph=True)

    monkeypatch.setattr(far, "run_block", None)
    result = []
    for item in (model, alone):
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


def test_what_a_block_gave_may_be_changed_in_place(
    model: Any, alone: Any, tokens: torch.Tensor
) -> None:
    for item in (model, alone):
        stream = item(tokens, stop_at_layer=N_LAYERS)
        stream += 1
        stream.square().sum().backward()

    same(far_gradients(model), far_gradients(alone))


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


def test_a_bias_may_be_changed_before_the_backward(
    model: Any, alone: Any, tokens: torch.Tensor
) -> None:
    for item in (model, alone):
        result = loss(item, tokens)
        with torch.no_grad():
            item.blocks[FAR].attn.b_O.add_(1)
        result.backward()

    same(far_gradients(model), far_gradients(alone))
    with torch.no_grad():
        model.blocks[FAR].attn.b_O.sub_(1)

"""Gradients and optimiser steps over several devices are those on one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparison import assert_agrees
from kinds import everywhere


@pytest.mark.cover(("kind", "fails_unpatched"))
@everywhere
def test_every_gradient(model: Any, reference: Any, tokens: torch.Tensor) -> None:
    for one in (model, reference):
        one(tokens, return_type="loss").backward()

    for name, parameter in model.named_parameters():
        expected = reference.get_parameter(name).grad
        assert (parameter.grad is None) == (expected is None), name
        if expected is not None:
            assert parameter.grad.device == parameter.device
            assert_agrees(parameter.grad, expected)


@pytest.mark.fails_unpatched
def test_an_optimiser_step(load: Any, toys: Any, tokens: torch.Tensor) -> None:
    model, reference = load("attention-only"), toys("cpu", 1)

    losses, expected = [], []
    for one, history in ((model, losses), (reference, expected)):
        optimiser = torch.optim.AdamW(one.parameters(), lr=0.01)
        for _ in range(3):
            loss = one(tokens, return_type="loss")
            history.append(loss)
            loss.backward()
            optimiser.step()
            optimiser.zero_grad()

    assert losses[2] < losses[0]
    assert_agrees(losses, expected, tolerance=1e-4)
    assert {str(p.device) for p in model.parameters()} == {"sim:0", "sim:1", "sim:2", "sim:3"}


@pytest.mark.fails_unpatched
def test_gradients_of_ones_own_function_of_the_logits(
    model: Any, reference: Any, tokens: torch.Tensor
) -> None:
    """A logit difference, as in attribution patching: its gradient at the first block."""

    def gradient(model: Any) -> torch.Tensor:
        kept = []
        hook = ("blocks.0.hook_resid_pre", lambda grad, hook: kept.append(grad.clone()))
        with model.hooks(bwd_hooks=[hook]):
            logits = model(tokens)
            (logits[:, -1, 5] - logits[:, -1, 7]).sum().backward()
        return kept[0]

    assert_agrees(gradient(model), gradient(reference))

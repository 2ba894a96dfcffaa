"""A part of what runs over several devices, on devices that run behind the host.

`pytest --asynchronous tests/dispatch tests/offload` runs all of it there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from comparison import assert_agrees
from kinds import GREEDY, home_of

from tl_devicefix.simulation.machine import Machine


@pytest.fixture(scope="module")
def machine(simulated: Any) -> Iterator[Machine]:
    with simulated(4, asynchronous=True) as machine:
        yield machine


def gradients(model: Any, tokens: torch.Tensor) -> Any:
    model.zero_grad()
    model(tokens, return_type="loss").backward()
    return [parameter.grad.cpu() for parameter in model.blocks.parameters()]


def steered(model: Any, tokens: torch.Tensor) -> Any:
    def steer(activation: torch.Tensor, hook: Any) -> torch.Tensor:
        return activation + model.blocks[0].mlp.W_out.sum(0)

    return model.run_with_hooks(tokens, fwd_hooks=[("blocks.3.hook_resid_mid", steer)]).cpu()


def generated(model: Any, tokens: torch.Tensor) -> Any:
    return model.generate(tokens, **GREEDY).cpu()


def cached(model: Any, tokens: torch.Tensor) -> Any:
    logits, cache = model.run_with_cache(tokens)
    return [logits.cpu(), cache.accumulated_resid().cpu(), cache["z", -1].cpu()]


@pytest.mark.parametrize("call", [gradients, steered, generated, cached])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_results_are_the_same(
    call: Callable[..., Any], model: Any, reference: Any, tokens: torch.Tensor
) -> None:
    assert_agrees(call(model, tokens.to(home_of(model))), call(reference, tokens))

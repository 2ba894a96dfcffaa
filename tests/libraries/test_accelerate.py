"""accelerate's `Accelerator` with models over several devices."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from comparison import assert_agrees


@pytest.fixture
def accelerator():
    """As a script makes one; it keeps its state in the process."""
    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)


def losses_of_training(accelerator, model, tokens):
    """Two steps as accelerate's guide has them; the losses before, between and after them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for _ in range(3):
        loss = model(tokens, return_type="loss")
        losses.append(loss.item())
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_prepare_leaves_a_spread_model_in_place_and_trains_it(load, on_one, accelerator, tokens):
    model, reference = load("llama"), on_one("llama")
    before = [parameter.device for parameter in model.parameters()]
    actual = losses_of_training(accelerator, model, tokens)
    assert_agrees(actual, losses_of_training(accelerator, reference, tokens), tolerance=1e-4)
    assert [parameter.device for parameter in model.parameters()] == before

"""Gradients arrive at the parameters on the host; training is what it is elsewhere."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from comparison import assert_agrees, assert_same_weights
from offloads import HOST, assert_at_rest, every_kind, some_offload

from tl_devicefix.offload.copying import keeping_on_host
from tl_devicefix.simulation.machine import Machine

LOOKS_INTO_ALL = (lambda name: True, lambda value, hook: None)
"""A hook by which no block is run whole by a rank, whose graph would not be counted here."""


@some_offload
def test_training_is_the_same(
    offload: str, load: Any, reference: Any, tokens: torch.Tensor
) -> None:
    model, reference = load("llama", offload), copy.deepcopy(reference)
    for variant in (model, reference):
        optimiser = torch.optim.AdamW(variant.parameters(), lr=1e-2)
        for _ in range(3):
            optimiser.zero_grad()
            variant(tokens, return_type="loss").backward()
            torch.nn.utils.clip_grad_norm_(variant.parameters(), 1.0)
            optimiser.step()

    assert_same_weights(model, reference, tolerance=1e-4)
    assert_at_rest(model)


@every_kind
def test_a_graph_does_not_keep_the_weights_that_have_visited(
    kind: str, models: Any, from_pretrained: Any, tokens: torch.Tensor, machine: Machine
) -> None:
    """But for GPT-2's W_Q, W_K and W_V, of which TransformerLens makes copies on any device."""
    kept = []
    for model in (models(kind, "all of one device"), from_pretrained(kind, device_map=0)):
        gc.collect()
        before = machine.memory_allocated(0)
        loss = model.run_with_hooks(tokens, return_type="loss", fwd_hooks=[LOOKS_INTO_ALL])
        gc.collect()
        kept.append(machine.memory_allocated(0) - before)
        del loss
    assert kept[0] == kept[1]


@pytest.mark.parametrize("changed", ["activation", "weight"])
def test_what_backward_needs_may_not_be_changed_before(changed: str) -> None:
    """Not simulated: there, torch cannot pass on an error that Python raises in backward."""
    tensors = {name: torch.ones(3, requires_grad=True) for name in ("weight", "activation")}
    copy_there = tensors["weight"] * 1
    with keeping_on_host([(copy_there, tensors["weight"])], HOST):
        result = (tensors["activation"] * copy_there).exp()
    assert_agrees(torch.autograd.grad(result.sum(), copy_there, retain_graph=True), [result])

    with torch.no_grad():
        {**tensors, "activation": result}[changed].mul_(2)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()

"""Moving, copying, saving and changing a model with offloaded blocks."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import NO_PROCESSING
from comparison import assert_agrees
from kinds import devices_of, home_of
from offloads import HOST, assert_at_rest, offloaded_blocks, some_offload


@some_offload
def test_a_dtype_keeps_the_blocks_on_the_host(
    offload: str, load: Any, on_cpu: Any, tokens: torch.Tensor
) -> None:
    model = load("llama", offload)
    before = offloaded_blocks(model)

    model.to(torch.float64)

    assert offloaded_blocks(model) == before
    assert_at_rest(model)
    assert_agrees(model(tokens), copy.deepcopy(on_cpu("llama")).to(torch.float64)(tokens))


@some_offload
def test_a_copy_runs_by_itself(
    offload: str, load: Any, reference: Any, tokens: torch.Tensor
) -> None:
    model = load("llama", offload)
    model(tokens)

    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    del model
    gc.collect()

    assert_at_rest(copied)
    assert_agrees(copied(tokens), reference(tokens), home_of(copied))
    assert_at_rest(copied)


def test_a_pickled_model_runs_where_it_is_put(
    load: Any, reference: Any, tokens: torch.Tensor, tmp_path: Path
) -> None:
    torch.save(load("llama", "some of three devices"), tmp_path / "model.pt")

    model = torch.load(tmp_path / "model.pt", map_location="cpu", weights_only=False)

    assert devices_of(model) == {"cpu"}
    assert_agrees(model(tokens), reference(tokens), HOST)


@some_offload
def test_weights_are_processed_on_the_device_and_kept_on_the_host(
    offload: str, load: Any, reference: Any, tokens: torch.Tensor
) -> None:
    model = load("llama", offload, **NO_PROCESSING)

    model.process_weights_()

    assert_at_rest(model)
    assert_agrees(model(tokens).log_softmax(-1), reference(tokens).log_softmax(-1), home_of(model))
    before = model.placement
    model.move_model_modules_to_device()
    model.setup()
    assert model.placement == before
    assert_at_rest(model)


class Probe(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.linspace(-1, 1, width))

    def forward(self, residual: torch.Tensor) -> torch.Tensor:
        return residual * self.scale


@pytest.mark.cover
@pytest.mark.parametrize("device", ["sim:0", "sim:3", "cpu"])
@some_offload
def test_attached_modules_run_wherever_they_are(
    device: str, offload: str, load: Any, reference: Any, tokens: torch.Tensor
) -> None:
    model, reference = load("llama", offload), copy.deepcopy(reference)
    if device == "sim:3":
        device = str(model.placement.devices[-1])
    for variant, location in ((model, device), (reference, "cpu")):
        variant.blocks[3].mlp = Probe(variant.cfg.d_model).to(location)
        variant.setup()

    assert_agrees(model(tokens), reference(tokens), home_of(model))
    assert model.blocks[3].mlp.scale.device == torch.device(device)

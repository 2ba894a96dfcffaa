"""Device maps, most of them with offloaded blocks, and a check of a model at rest."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

HOST = torch.device("cpu")

DEVICE_MAPS = {
    "some of one device": {"": 0, "blocks.1": "cpu", "blocks.2": "cpu", "blocks.4": "cpu"},
    "all of one device": {"": 0, "blocks": "cpu"},
    "some of three devices": {
        "": 0, "blocks.1": "cpu", "blocks.2": 1, "blocks.3": "cpu", "blocks.4": 2,
    },
    "all but one of two devices": {"": 0, "blocks": "cpu", "blocks.2": 1},
    "scattered": {
        "": 1, "embed": 2, "blocks": 3, "blocks.0": 1, "blocks.1": 0, "blocks.2": 1, "ln_final": 0,
    },
}  # fmt: skip


def assert_at_rest(model: Any) -> None:
    """Assert that weights are where the placement stores them, and that none is a copy."""
    modules = dict(model.named_modules())
    for component in model.placement.components:
        for parameter in modules[component.name].parameters():
            assert parameter.is_leaf, f"a copy in {component.name}"
            assert parameter.device == component.stored_on, component.name
        for buffer in modules[component.name].buffers():
            assert buffer.device == component.device, component.name


def weights_of(block: torch.nn.Module) -> int:
    """Bytes of a block's parameters."""
    return sum(parameter.nbytes for parameter in block.parameters())


def offloaded_blocks(model: Any) -> list[int]:
    """Return the numbers of the offloaded blocks."""
    blocks = [c for c in model.placement.components if c.name.startswith("blocks.")]
    return [layer for layer, component in enumerate(blocks) if component.offloaded]


def assert_two_blocks_at_a_time(
    model: Any, machine: Any, run: Callable[[], object], activations: float
) -> None:
    """Assert a run's peak on each device: two offloaded blocks, and less than `activations` more.

    Memory is counted in blocks.
    """
    block = max(weights_of(model.blocks[layer]) for layer in offloaded_blocks(model))
    runs_on = [it.device for it in model.placement.components if it.offloaded]
    gc.collect()
    before = {device: machine.memory_allocated(device) for device in model.placement.devices}
    for device in before:
        machine.reset_peak_memory_stats(device)

    with torch.no_grad():
        run()
    gc.collect()

    for device, held in before.items():
        visiting = min(2, runs_on.count(device))
        taken = (machine.max_memory_allocated(device) - held) / block
        assert visiting <= taken < visiting + activations, (device, model.placement)
        assert machine.memory_allocated(device) == held

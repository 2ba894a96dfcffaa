"""`dry_run` of a HookedTransformer: what is its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import EVERY_ARCHITECTURE

from tl_devicefix import DryRun, dry_run


@pytest.mark.parametrize("name", EVERY_ARCHITECTURE)
def test_parameters_are_laid_out_as_loading_lays_them_out(name: str, from_pretrained: Any) -> None:
    """For what a forward allocates depends on it."""
    loaded = from_pretrained(name, device="cpu")
    strides: dict[str, Any] = {}

    def look(model: Any) -> None:
        strides.update({name: order(p) for name, p in model.named_parameters()})

    dry_run(loaded.cfg, look)

    assert strides == {name: order(p) for name, p in loaded.named_parameters()}


def order(tensor: torch.Tensor) -> list[int]:
    """The dimensions longer than 1, slowest first."""
    dims = [dim for dim in range(tensor.dim()) if tensor.shape[dim] > 1]
    return sorted(dims, key=tensor.stride, reverse=True)


def test_a_subclass_and_a_device_map() -> None:
    from transformer_lens import HookedTransformer

    class Mine(HookedTransformer):
        """A user's own."""

    device_map = {"": 0, "blocks.3": 1}
    dry: DryRun = dry_run("gpt2", type, n_devices=2, device_map=device_map, cls=Mine)

    assert dry.result is Mine
    assert str(dry.placement.device_of("blocks.3")) == "sim:1"

"""Carry the residual stream, and what goes with it, across devices during a forward.

A model on several devices gets PyTorch hooks on its components: before a component runs, its
inputs come to its device; what leaves the model comes home. A model on one device gets none,
unless blocks of it are offloaded.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from tl_devicefix.dispatch import forward as running
from tl_devicefix.dispatch.carrying import first_block
from tl_devicefix.dispatch.forward import is_aligned
from tl_devicefix.dispatch.scheduler import device_of_turn
from tl_devicefix.hooked_transformer.components import is_own
from tl_devicefix.monkeypatch.patch import patches
from tl_devicefix.placement.placement import Placement


def align(model: Any, placement: Placement) -> None:
    """Make `model` run over the devices of `placement`, replacing any earlier alignment."""
    unalign(model)
    running.align(model, placement, lambda name: not name.startswith("blocks."), is_own)


def unalign(model: Any) -> None:
    """Undo `align`, also for ALiBi biases, which lie on an earlier device."""
    running.unalign(model)
    if model.cfg.positional_embedding_type == "alibi":
        for block in model.blocks:
            block.attn.alibi = None  # TransformerLens makes it anew


@patches(
    "HookedTransformer",
    takes="self",
    why="SAEs and the like run where they are, whatever block they are attached to",
)
def setup(original: Any, self: Any) -> Any:
    """`HookedRootModule.setup`, which is called whenever a module has been attached or removed."""
    result = original(self)
    if is_aligned(self):
        align(self, self.placement)
    return result


# Which placement belongs to a config: TransformerLens asks for a block's device by config alone.
# Keyed by identity, as configs are not hashable, and forgotten with the config.
_placements: dict[int, tuple[weakref.ref[Any], Placement]] = {}


def remember_placement(cfg: Any, placement: Placement) -> None:
    """Record that the model with this config object is placed so."""
    key = id(cfg)
    _placements[key] = (weakref.ref(cfg, lambda _: _placements.pop(key, None)), placement)


def placement_of(cfg: Any) -> Placement | None:
    """The placement of the model with this config object, if it has been placed."""
    entry = _placements.get(id(cfg))
    return entry[1] if entry is not None and entry[0]() is cfg else None


@patches(
    None,
    takes="index cfg device",
    why="route the residual stream by the placement",
    until="3.9",
)
def get_device_for_block_index(
    index: int, cfg: Any, device: torch.device | str | None = None
) -> torch.device:
    """Where the residual stream must be for a block, by the model's placement.

    Replaces TransformerLens's, which goes by index even where the block lies elsewhere.
    TransformerLens also asks for index 0 when it means the device of the tokens, which is home;
    block 0 fetches its own input if it lies elsewhere.
    """
    placement = placement_of(cfg)
    if placement is None:
        return _by_index(index, cfg, torch.device(cfg.device if device is None else device))
    if index == 0 or len(placement.devices) == 1:
        return placement.home
    turn_device = device_of_turn()
    if turn_device is not None and index > first_block():
        return (
            turn_device  # as the block takes it along in its turn, and on streams of the run's own
        )
    index = max(index, min(first_block(), cfg.n_layers - 1))  # none is skipped by way of others
    return placement.device_of(f"blocks.{index}")


def _by_index(index: int, cfg: Any, first: torch.device) -> torch.device:
    """Equal shares, for what is not placed: arithmetic as in TransformerLens, which asks no device.

    Unlike TransformerLens 2, it does not run off the end.
    """
    if first.type in ("cpu", "meta"):
        return first
    share = min(index * cfg.n_devices // cfg.n_layers, cfg.n_devices - 1)
    return torch.device(first.type, (first.index or 0) + share)

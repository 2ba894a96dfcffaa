"""Carry the residual stream, and what goes with it, across devices during a forward.

A model on several devices gets PyTorch hooks on its components: before a component runs, its
inputs come to its device; what leaves the model comes home. A model on one device gets none,
unless blocks of it are offloaded.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tl_devicefix.dispatch.attached import attach, detach
from tl_devicefix.dispatch.carrying import bring_home, move
from tl_devicefix.dispatch.forward import HANDLES, is_aligned
from tl_devicefix.dispatch.hooking import let_hooks_be, let_hooks_mix
from tl_devicefix.dispatch.put_in import watch
from tl_devicefix.dispatch.scheduler import device_of_turn, going_to
from tl_devicefix.dispatch.skipping import first_block, is_skipped
from tl_devicefix.hooked_transformer.components import is_own
from tl_devicefix.offload.visiting import let_stay, let_visit
from tl_devicefix.placement.placement import Placement


def align(model: Any, placement: Placement) -> None:
    """Make `model` run over the devices of `placement`, replacing any earlier alignment."""
    unalign(model)
    if len(placement.memories) == 1:
        return
    handles = []
    for path, before, hook in _hooks(model, placement):
        module = model.get_submodule(path)
        add = module.register_forward_pre_hook if before else module.register_forward_hook
        handles.append(add(hook, with_kwargs=hook is keep_mask or before))
    model.__dict__[HANDLES] = handles
    let_visit(model, placement)
    handles += watch(model, placement, _attach)
    let_hooks_mix(model, placement)


def _attach(model: Any, placement: Placement) -> None:
    attach(model, placement, is_own)


def _hooks(model: Any, placement: Placement) -> Iterator[tuple[str, bool, Any]]:
    """Each hook that a model on several devices has: on which module, and whether before it."""
    for name, device in placement.device_map.items():
        if name.startswith("blocks."):
            yield name, True, CarryToBlock(device)
            yield name, False, keep_mask
        else:
            yield name, True, CarryTo(device)
            yield name, False, BringHome(placement.home)


def not_aligned(model: Any, placement: Placement) -> list[str]:
    """The modules that lack a hook of `align`, as someone put them in after it."""
    if len(placement.devices) == 1:
        return []
    lacking = []
    for path, before, hook in _hooks(model, placement):
        module = model.get_submodule(path)
        there = module._forward_pre_hooks if before else module._forward_hooks
        if hook not in there.values():
            lacking.append(path)
    return list(dict.fromkeys(lacking))


def unalign(model: Any) -> None:
    """Remove the hooks that `align` added, and ALiBi biases left on an earlier device."""
    for handle in model.__dict__.pop(HANDLES, ()):
        handle.remove()
    detach(model)
    let_stay(model)
    let_hooks_be(model)
    if model.cfg.positional_embedding_type == "alibi":
        for block in model.blocks:
            block.attn.alibi = None  # TransformerLens makes it anew


def setup(original: Any, self: Any) -> Any:
    """`HookedRootModule.setup`, which is called whenever a module has been attached or removed."""
    result = original(self)
    if is_aligned(self):
        align(self, self.placement)
    return result


@dataclass(frozen=True)
class CarryTo:
    """Forward pre-hook: bring a component's inputs to its device.

    It holds a device and no module, so that a copied or pickled model keeps working.
    """

    device: torch.device

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments, on the device."""
        with going_to(self.device):
            return (
                tuple(move(value, self.device) for value in args),
                {name: move(value, self.device) for name, value in kwargs.items()},
            )


@dataclass(frozen=True)
class CarryToBlock:
    """Forward pre-hook: bring a block's residual stream, attention mask and KV cache to it.

    TransformerLens hands every block the mask from home. It is copied once for each device, not
    for each block: the copy travels with the residual stream that the previous block returned.
    """

    device: torch.device

    def __call__(
        self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the block's arguments, on the device."""
        if is_skipped(block):
            return args, kwargs
        with going_to(self.device, block):
            return self._carried(args, dict(kwargs))

    def _carried(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        mask = kwargs.get("attention_mask")
        if mask is not None and mask.device != self.device:
            kwargs["attention_mask"] = self._mask_here(mask, args[0])
        entry = kwargs.get("past_kv_cache_entry")
        if entry is not None:
            entry.past_keys = move(entry.past_keys, self.device)
            entry.past_values = move(entry.past_values, self.device)
        if kwargs.get("shortformer_pos_embed") is not None:
            kwargs["shortformer_pos_embed"] = move(kwargs["shortformer_pos_embed"], self.device)
        return tuple(move(value, self.device) for value in args), kwargs

    def _mask_here(self, mask: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        carried: Any = getattr(residual, _MASK, None)
        # It is elsewhere where the stream has come here as it was, for the block to take it along.
        is_here = carried is not None and carried.device == self.device
        version = None if mask.is_inference() else mask._version
        if is_here and getattr(carried, SOURCE) is mask and carried.__dict__[_VERSION] == version:
            return carried
        carried = move(mask, self.device)
        setattr(carried, SOURCE, mask)
        setattr(carried, _VERSION, version)
        return carried


_MASK = "_tl_devicefix_mask"
SOURCE = "_tl_devicefix_source"
"""Attribute of a mask that was carried to another device: the one that it is a copy of."""
_VERSION = "_tl_devicefix_version"
"""Attribute of a mask that was carried: how often its source was changed before, by hooks."""


def keep_mask(
    block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], residual: torch.Tensor
) -> None:
    """Forward hook: let the copied mask travel with the residual stream to the next block."""
    mask = kwargs.get("attention_mask")
    if mask is not None and hasattr(mask, SOURCE):
        setattr(residual, _MASK, mask)


@dataclass(frozen=True)
class BringHome:
    """Forward hook: bring what a component returns to the home device."""

    home: torch.device

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return the output, at home."""
        with going_to(self.home):
            return bring_home(output, self.home)


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
    here = device_of_turn()
    if here is not None and index > first_block():
        return here  # as the block takes it along in its turn, and on streams of the run's own
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

"""The tensors of a model itself, and where each belongs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tl_devicefix.dispatch.naming import joined, named_modules
from tl_devicefix.dispatch.user_modules import runs_where_it_is
from tl_devicefix.monkeypatch.versions import is_bridge
from tl_devicefix.placement.devices import resolve
from tl_devicefix.placement.placement import Placement


@dataclass(frozen=True)
class Tensor:
    """A parameter or buffer of the model itself, and where it belongs."""

    path: str
    """The name of the module that holds it."""
    name: str
    """Its name there."""
    module: nn.Module
    value: torch.Tensor
    planned: torch.device

    @property
    def is_misplaced(self) -> bool:
        """Whether it is elsewhere; what is on meta has no values to be anywhere."""
        return not self.value.is_meta and self.value.device != self.planned


def tensors(model: Any) -> Iterator[Tensor]:
    """All tensors but those of attached modules, whose place is their owner's business."""
    planned = planned_by(model)
    aside = {each for _, root in attached(model) for each in root.modules()}
    for path, module in named_modules(model):
        if module in aside:
            continue
        for held, of_weights in ((module._parameters, True), (module._buffers, False)):
            for name, value in held.items():
                if value is not None:
                    there = planned(joined(path, name), of_weights)
                    yield Tensor(path, name, module, value, there)


def placement_of_model(model: Any) -> Placement | None:
    """The model's placement; None if it was built on one device, or is not spread yet."""
    return getattr(model, "placement", None)


def is_unspread(model: Any) -> bool:
    """Whether it is built for several devices, and not on them yet (`move_to_device=False`)."""
    if is_bridge(model):  # which is booted where it stays
        return False
    return placement_of_model(model) is None and model.cfg.n_devices > 1


def planned_by(model: Any) -> Callable[[str, bool], torch.device]:
    """A name in the model, and whether it is a weight's -> its device.

    By the placement, or else by `cfg.device`.

    Raises:
        ValueError: if there is no placement, and no such device.
    """
    placement = placement_of_model(model)
    if placement is not None:
        return placement.device_for
    device = resolve(model.cfg.device)
    return lambda name, of_weights: device


def attached(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """The attached modules that were set up: they run where they are.

    Not those that TransformerLens itself has there, which someone moved before a setup.
    """
    for path, module in model.named_modules():
        if runs_where_it_is(module) and not is_own(model, path, module):
            yield path, module


def is_own(model: Any, path: str, module: nn.Module) -> bool:
    """Whether TransformerLens has a module of this class there itself."""
    from tl_devicefix.hooked_transformer import components

    return components.is_own(model, path, module)

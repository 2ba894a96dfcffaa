"""Whether the config names the devices that the model is on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tl_devicefix.checking.report import Finding
from tl_devicefix.checking.tensors import is_unspread, placement_of_model
from tl_devicefix.placement.devices import with_index


def config_findings(model: Any) -> Iterator[Finding]:
    """A `cfg.device` or `cfg.n_devices` that is not the placement's."""
    placement, cfg = placement_of_model(model), model.cfg
    if is_unspread(model):
        message = f"cfg.n_devices is {cfg.n_devices}, but the model has not been spread"
        fix = "model.move_model_modules_to_device()"
        yield Finding("config", "cfg.n_devices", message, fix)
    if placement is None:
        return
    home, count = placement.home, len(placement.devices)
    if torch.device(cfg.device).type != home.type or with_index(torch.device(cfg.device)) != home:
        message = f"cfg.device is {str(cfg.device)!r}, but the placement's home is {home}"
        yield Finding("config", "cfg.device", message, f'model.cfg.device = "{home}"')
    if cfg.n_devices != count:
        message = f"cfg.n_devices is {cfg.n_devices}, but the placement has {count} devices"
        yield Finding("config", "cfg.n_devices", message, f"model.cfg.n_devices = {count}")

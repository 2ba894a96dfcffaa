"""Bring what a component takes or returns to a device."""

from __future__ import annotations

from typing import Any

import torch

from tl_devicefix.running.turns import current_run


def move(value: Any, device: torch.device) -> Any:
    """Bring a tensor to a device; leave anything else alone."""
    if isinstance(value, torch.Tensor) and value.device != device:
        run = current_run()
        return value.to(device) if run is None else run.send(value, device)
    return value


def bring_home(output: Any, home: torch.device) -> Any:
    """Bring a tensor, or the tensors in TransformerLens's `Output`, to the home device."""
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return type(output)(*(move(part, home) for part in output))
    return move(output, home)

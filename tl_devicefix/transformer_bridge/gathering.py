"""A Bridge's weights of several blocks, stacked on one device: home, or that of `gather_on`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tl_devicefix.gathering.cache_at_home import CacheAtHome
from tl_devicefix.gathering.gathering import gathering_device, stack_on


def stack_block_params(
    original: Any,
    self: Any,
    attr_path: str,
    reshape_fn: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """`TransformerBridge._stack_block_params`, of blocks on any devices, in one copy."""
    device = gathering_device(self)
    if device is None:
        return original(self, attr_path, reshape_fn)
    weights: list[torch.Tensor] = []
    original(self, attr_path, _collecting(device, weights, reshape_fn))
    return stack_on(device, weights, f"bridge.{attr_path.rpartition('.')[2]}")


def get_params(original: Any, self: Any) -> dict[str, torch.Tensor]:
    """`TransformerBridge.get_params`: a dict whose weights are read together when asked for."""
    device = gathering_device(self)
    weights: dict[str, torch.Tensor] = original(self)
    return weights if device is None else CacheAtHome(device).of(weights)


def stack_params_for(
    original: Any,
    self: Any,
    submodule: str,
    attr_path: str,
    reshape_fn: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> tuple[list[int], torch.Tensor]:
    """`TransformerBridge.stack_params_for`, of blocks on any devices, in one copy."""
    device = gathering_device(self)
    if device is None:
        return original(self, submodule, attr_path, reshape_fn)
    weights: list[torch.Tensor] = []
    indices, _ = original(self, submodule, attr_path, _collecting(device, weights, reshape_fn))
    return indices, stack_on(device, weights, f"bridge.{attr_path.rpartition('.')[2]}")


def _collecting(
    device: torch.device,
    weights: list[torch.Tensor],
    reshape_fn: Callable[[torch.Tensor], torch.Tensor] | None,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A `reshape_fn` that keeps what it makes, and gives TransformerLens next to nothing to stack.

    Which blocks have the weight, and what is said of those that lack it, is TransformerLens's.
    """

    def keep(weight: torch.Tensor) -> torch.Tensor:
        if weight is None:  # TransformerLens 3.9 finds out when it stacks them
            raise TypeError("the blocks have no such parameter (a projection without biases)")
        weights.append(weight if reshape_fn is None else reshape_fn(weight))
        return torch.empty(0, device=device)

    return keep

"""Modules that other libraries attach to a block, such as SAEs: run where they are.

Written for one device, they are at home, whichever block they are attached to. What goes into one
joins its weights, and what comes out is carried back to the block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from tl_devicefix.alignment import bring_home, is_aligned
from tl_devicefix.hooking import JoinedAt, let_hooks_mix
from tl_devicefix.patches import original

_ATTACHED = "_tl_devicefix_attached"


def setup(self: Any) -> Any:
    """`HookedRootModule.setup`, which is called whenever a module has been attached or removed."""
    result = original(type(self), "setup")(self)
    for module in self.__dict__.pop(_ATTACHED, ()):
        module.__dict__.pop("forward", None)
    if is_aligned(self):
        let_hooks_mix(self, self.placement)
        attached = dict(attached_modules(self))
        for name, module in attached.items():
            module.forward = ForwardWhereItIs(
                module, frozenset(self.placement.devices), self.placement.device_of(name)
            )
        self.__dict__[_ATTACHED] = list(attached.values())
    return result


def attached_modules(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """By name, the outermost modules in the blocks that are of other libraries."""
    found: list[str] = []
    for name, module in model.blocks.named_modules(prefix="blocks"):
        package = type(module).__module__.partition(".")[0]
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if package not in ("transformer_lens", "torch") and not inside:
            found.append(name)
            yield name, module


class ForwardWhereItIs:
    """An attached module's forward: at its weights, wherever these are when it is called.

    Args:
        module: the attached module, whose forward this replaces while it is attached.
        devices: the model's; tensors on these are brought to the weights.
        back: where to return the result: the block's device.
    """

    def __init__(
        self, module: nn.Module, devices: frozenset[torch.device], back: torch.device
    ) -> None:
        self._forward: Callable[..., Any] = module.forward
        self._module = module
        self._devices = devices
        self._back = back

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's own forward."""
        with JoinedAt(_device(self._module) or self._back, self._devices):
            return bring_home(self._forward(*args, **kwargs), self._back)


def _device(module: nn.Module) -> torch.device | None:
    """Where a module's weights are; SAELens's wrapper holds the SAE aside of its submodules."""
    held = [each for each in vars(module).values() if isinstance(each, nn.Module)]
    weights = (weight for each in (module, *held) for weight in each.parameters())
    return next((weight.device for weight in weights), None)

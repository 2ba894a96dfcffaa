"""Modules that people attach to a block, such as SAEs and probes: run where they are.

Written for one device, they are at home, whichever block they are attached to. What goes into one
joins its weights, and what comes out is carried back to the block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tl_devicefix.carrying import bring_home
from tl_devicefix.joining import JoinedAt
from tl_devicefix.placement import Placement

_ATTACHED = "_tl_devicefix_attached"


def attach(model: Any, placement: Placement) -> None:
    """Have each attached module run where it is, on a model that runs over several devices."""
    attached = dict(attached_modules(model, placement))
    for name, module in attached.items():
        module.forward = ForwardWhereItIs(  # type: ignore[method-assign]
            module, frozenset(placement.devices), placement.device_of(name)
        )
    model.__dict__[_ATTACHED] = list(attached.values())


def detach(model: Any) -> None:
    """Undo `attach`."""
    for module in model.__dict__.pop(_ATTACHED, ()):
        run = vars(module).get("forward")
        if isinstance(run, ForwardWhereItIs):
            del module.forward
            if run.own is not None:
                module.forward = run.own


def attached_modules(model: Any, placement: Placement) -> Iterator[tuple[str, nn.Module]]:
    """By name, the outermost modules in the blocks that are not TransformerLens's.

    It uses some of torch's itself, but on the block's device.
    """
    found: list[str] = []
    for name, module in model.blocks.named_modules(prefix="blocks"):
        package = type(module).__module__.partition(".")[0]
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if inside or package == "transformer_lens":
            continue
        if package != "torch" or _device(module) not in (None, placement.device_of(name)):
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
        self.own = vars(module).get("forward")
        """The forward of this very module, if that is not its class's."""
        self._module = module
        self._devices = devices
        self._back = back

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's own forward."""
        module = self._module
        forward = self.own or type(module).forward.__get__(module)
        with JoinedAt(_device(module) or self._back, self._devices):
            return bring_home(forward(*args, **kwargs), self._back)


def _device(module: nn.Module) -> torch.device | None:
    """Where a module's weights are; SAELens's wrapper holds the SAE aside of its submodules."""
    held = [each for each in vars(module).values() if isinstance(each, nn.Module)]
    weights = (weight for each in (module, *held) for weight in each.parameters())
    return next((weight.device for weight in weights), None)

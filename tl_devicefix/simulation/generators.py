"""``torch.Generator("sim:1")``: the CPU's generator, whose numbers simulated devices give too."""

from __future__ import annotations

from typing import Any

import torch

from tl_devicefix.simulation.backend import active_machine
from tl_devicefix.simulation.machine import DEVICE_TYPE

_CPU_GENERATOR = torch.Generator


class _AlsoTorchs(type(_CPU_GENERATOR)):  # type: ignore[misc]
    """Makes those that were made before, or are on another device, instances too."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _CPU_GENERATOR)


class Generator(_CPU_GENERATOR, metaclass=_AlsoTorchs):
    """Stands in for ``torch.Generator``, and says which simulated device it is on."""

    _device: torch.device

    def __new__(cls, device: Any = "cpu") -> Any:
        """Make one, or torch's own for any other type of device.

        Raises:
            RuntimeError: if the machine has no such device.
        """
        device = torch.device(device)
        if device.type != DEVICE_TYPE:
            return _CPU_GENERATOR(device)
        generator: Any = super().__new__(cls, "cpu")  # type: ignore[call-arg]
        # As on CUDA, without an index it is the current device's.
        machine = active_machine()
        generator._device = machine.devices[machine.index_of(device)]
        return generator

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The simulated device."""
        return self._device

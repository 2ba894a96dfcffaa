"""How long asynchronous devices take, where they are told to take time."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten

_COUNTED_AS: dict[Any, Any] = {  # the CPU's kernels, by those that torch has formulas for
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        aten._scaled_dot_product_flash_attention_backward
    ),
}


class Speed(NamedTuple):
    """What a device does in a second; None for what takes no time."""

    flops: float | None
    bytes: float | None

    def seconds_for(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> float:
        """How long an operation takes: by torch's formulas, and 0 where it has none."""
        if self.flops is None:
            return 0.0
        packet = func._overloadpacket
        formula: Any = flop_registry.get(_COUNTED_AS.get(packet, packet))
        return 0.0 if formula is None else formula(*args, **kwargs, out_val=result) / self.flops

    def seconds_to_copy(self, copied: torch.Tensor) -> float:
        """How long a copy takes from a device to another, or between one and the host."""
        return 0.0 if self.bytes is None else copied.numel() * copied.element_size() / self.bytes


NO_TIME = Speed(None, None)


def speed(flops_per_second: float | None, bytes_per_second: float | None) -> Speed:
    """What `simulate` was given.

    Raises:
        ValueError: if one of them is not above 0.
    """
    given = {"flops_per_second": flops_per_second, "bytes_per_second": bytes_per_second}
    for name, value in given.items():
        if value is not None and not value > 0:
            raise ValueError(f"{name} must be above 0, but is {value!r}.")
    return Speed(flops_per_second, bytes_per_second)

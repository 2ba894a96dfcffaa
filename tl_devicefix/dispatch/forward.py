"""The forward of a model on several devices: what leaves it is at home."""

from __future__ import annotations

from typing import Any

from tl_devicefix.dispatch.carrying import bring_home, is_output_read
from tl_devicefix.dispatch.interruption import refuse_unfinished
from tl_devicefix.dispatch.put_in import look_early
from tl_devicefix.dispatch.scheduler import device_of_turn, going_to, return_to
from tl_devicefix.offload.visiting import touring
from tl_devicefix.tracebacks import noting_mixed_devices

HANDLES = "_tl_devicefix_handles"


def is_aligned(model: Any) -> bool:
    """Whether the model runs over several devices, or has offloaded blocks."""
    return HANDLES in model.__dict__


def forward(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """`HookedTransformer.forward`, whose results are at home also where it stops at a layer.

    A patch and not a hook, as `generate` and `run_with_hooks` call `forward` and pass hooks by.

    Raises:
        RuntimeError: if the model's weights are only partly processed.
    """
    refuse_unfinished(self)
    if not is_aligned(self):
        return original(self, *args, **kwargs)
    look_early(self, self.placement)
    before = device_of_turn()
    try:
        with (
            noting_mixed_devices(),
            touring(self, kwargs.get("start_at_layer"), kwargs.get("stop_at_layer")),
        ):
            output = original(self, *args, **kwargs)
        if not is_output_read():
            return output
        with going_to(self.placement.home):
            return bring_home(output, self.placement.home)
    finally:
        return_to(before)

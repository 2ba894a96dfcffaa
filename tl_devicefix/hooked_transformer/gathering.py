"""A HookedTransformer's weights of several blocks, stacked at home or on `gather_on`'s device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tl_devicefix.gathering.gathering import STACKED, gathering_device, stack_on


@functools.cache
def stacked(name: str) -> Callable[..., Any]:
    """The getter of `HookedTransformer.W_Q` and its like: [n_layers, ...], in one copy."""

    def get(original: Any, self: Any) -> Any:
        path = STACKED[name].split(".")
        device = gathering_device(self)
        if device is None or (name == "W_gate" and not self.cfg.gated_mlp):
            return original(self)
        repeats = 1
        if hasattr(self.blocks[0].attn, f"_{path[-1]}"):  # of key-value heads, each for its group
            repeats = self.blocks[0].attn.repeat_kv_heads
            path = ["attn", f"_{path[-1]}"]
        weights = [functools.reduce(getattr, path, block) for block in self.blocks]
        stack = stack_on(device, weights, f"model.{name}", 1 if repeats == 1 else repeats + 1)
        return stack.repeat_interleave(repeats, dim=1) if repeats > 1 else stack

    return get

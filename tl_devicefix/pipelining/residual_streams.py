"""The residual stream of the unpatched run, where runs of a sweep start."""

from __future__ import annotations

import math
from typing import Any

from tl_devicefix.dispatch.carrying import move
from tl_devicefix.dispatch.skipping import output_of, skipping
from tl_devicefix.pipelining.first_block import INPUTS


class ResidualStreams:
    """What the blocks of a model return in the unpatched run, computed when it is asked for.

    It goes on from what it has: runs in the order of their layers compute each block once. Kept are
    the last that was asked for and every k-th, k being the square root of the number of blocks:
    in any other order, a run computes fewer than k blocks anew. Each lies on the device of the
    block that takes it.

    Args:
        model: nobody may have a hook on the blocks that are asked for, or before them.
        tokens: what it is run on.
        arguments: those that `run_with_hooks` gets with them.
    """

    def __init__(self, model: Any, tokens: Any, arguments: dict[str, Any]) -> None:
        self._model = model
        self._tokens = tokens
        self._inputs = {name: value for name, value in arguments.items() if name in INPUTS}
        self._kept: dict[int, Any] = {}

    def before(self, layer: int) -> Any:
        """What the block before `layer` (which is 1 or more) returns, in whatever form it does."""
        every = math.isqrt(len(self._model.blocks))
        start = max((kept for kept in self._kept if kept <= layer), default=0)
        for stop in range(start + 1, layer + 1):
            if stop == layer or stop % every == 0:
                self._kept[stop] = self._go_on(start, stop)
                start = stop
        for kept in list(self._kept):
            if kept != layer and kept % every:
                del self._kept[kept]
        return self._kept[layer]

    def _go_on(self, start: int, stop: int) -> Any:
        blocks = self._model.blocks
        with skipping(blocks, start, self._kept.get(start)):
            output = output_of(
                blocks[stop - 1], lambda: self._model.forward(self._tokens, **self._inputs)
            )
        placement = getattr(self._model, "placement", None)
        if placement is None or stop == len(blocks):
            return output
        device = placement.device_of(f"blocks.{stop}")
        if isinstance(output, tuple):
            return type(output)((move(output[0], device), *output[1:]))
        return move(output, device)

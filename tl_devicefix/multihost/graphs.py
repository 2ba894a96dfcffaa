"""The graph of a block that was run whole, for a backward through it, where the block is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from tl_devicefix.multihost.caching import Key
from tl_devicefix.multihost.snapshots import tensors_of


def called(
    block: nn.Module, given: dict[str, Any], entry: tuple[Any, ...] | None
) -> list[torch.Tensor]:
    """Run a copy of a block without gradients; returns what it gives, and what a KV cache has got.

    Args:
        block: the copy.
        given: its arguments.
        entry: class, keys, values of a KV cache's entry, and whether it is frozen.
    """
    if entry is None:
        return [block(**given)]
    cls, keys, values, is_frozen = entry
    there = cls(past_keys=keys, past_values=values, frozen=is_frozen)
    output = block(**given, past_kv_cache_entry=there)
    return [output] if is_frozen else [output, there.past_keys, there.past_values]


class Graph:
    """A forward of a copy of a block, and what a backward through it needs.

    Args:
        block: the copy.
        given: its arguments.
        keys: of the tensors that ask for gradients.

    Attributes:
        inputs: what asks for gradients.
        output: what the block gives.
    """

    def __init__(self, block: nn.Module, given: dict[str, Any], keys: Sequence[Key]) -> None:
        leaves = {key: given[key].detach() for key in keys if isinstance(key, str)}
        tensors = tensors_of(block)
        for index, each in enumerate(tensors):
            if each.requires_grad != (index in keys):
                each.requires_grad_(index in keys)
        self.inputs = [
            leaves[key].requires_grad_() if isinstance(key, str) else tensors[key] for key in keys
        ]
        with torch.enable_grad():
            self._made: torch.Tensor = block(**{**given, **leaves})
        # What a sum gives, its gradient does not need: it may be changed in place.
        is_sum = self._made.grad_fn is not None and self._made.grad_fn.name() == "AddBackward0"
        self.output = self._made.detach() if is_sum else self._made.detach().clone()

    def backward(
        self, gradient: torch.Tensor, which: Sequence[int], keeps: bool = False
    ) -> list[torch.Tensor | None]:
        """Gradients of some of the tensors that ask for them; None of what is not used.

        Args:
            gradient: of the output.
            which: of the keys.
            keeps: whether there may be another backward.
        """
        inputs = [self.inputs[each].requires_grad_() for each in which]
        return list(
            torch.autograd.grad(self._made, inputs, gradient, retain_graph=keeps, allow_unused=True)
        )

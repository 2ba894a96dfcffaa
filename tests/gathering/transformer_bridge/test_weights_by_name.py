"""A Bridge's weights by names: `tl_parameters()`, and those of which others are made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparison import assert_agrees
from transformer_lens.model_bridge import TransformerBridge


@pytest.mark.fails_unpatched
def test_weights_by_name_are_read_at_home(machine: Any, dispatched: Any, references: Any) -> None:
    weights = dispatched("llama").tl_parameters()

    assert_agrees(dict(weights.items()), references("llama").tl_parameters(), machine.devices[0])


class Borrowing:
    """An object that is no Bridge, and has all that one has."""

    def __init__(self, bridge: Any) -> None:
        self.bridge = bridge

    def __getattr__(self, name: str) -> Any:
        return getattr(self.bridge, name)


def test_an_object_of_another_class_may_borrow_its_methods(dispatched: Any) -> None:
    bridge = dispatched("llama")
    borrowing: Any = Borrowing(bridge)

    stack = TransformerBridge._stack_block_params(borrowing, "attn.W_O")
    weights = TransformerBridge.get_params(borrowing)

    assert torch.equal(stack, bridge.W_O)
    assert_agrees(dict(weights.items()), dict(bridge.get_params().items()))

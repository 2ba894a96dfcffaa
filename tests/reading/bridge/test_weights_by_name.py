"""`tl_parameters()`, which only a Bridge has: weights by TransformerLens's names, at home."""

from __future__ import annotations

from typing import Any

import pytest
from comparison import assert_agrees


@pytest.mark.fails_unpatched
def test_weights_by_name_are_read_at_home(machine: Any, dispatched: Any, references: Any) -> None:
    weights = dispatched("llama").tl_parameters()

    assert_agrees(dict(weights.items()), references("llama").tl_parameters(), machine.devices[0])

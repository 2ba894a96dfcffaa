"""A copy of a Bridge that was dispatched by accelerate is a model of its own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch


@pytest.mark.fails_unpatched
def test_a_deep_copy_changes_alone(dispatched: Any) -> None:
    """Hugging Face's `to` of a model over devices is bound to the model that was copied."""
    bridge = dispatched("llama")

    copy.deepcopy(bridge).to(torch.float64)

    assert {parameter.dtype for parameter in bridge.parameters()} == {torch.float32}

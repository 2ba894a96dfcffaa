"""What a run gives with "sdpa" beside what it gives as installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from comparison import assert_agrees

import tl_devicefix


def assert_either_way(model: Any, run: Callable[[Any], Any]) -> None:
    """A run of a model gives the same with "sdpa" and as installed."""
    with tl_devicefix.set_attn_implementation(model, "eager"):
        expected = run(model)
    with tl_devicefix.set_attn_implementation(model, "sdpa"):
        actual = run(model)
    assert_agrees(actual, expected)

"""STAND-IN, to be replaced: `in_flight` of the same signature, with one run after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any


def in_flight(
    model: Any, run: Callable[[Any, Any], Any], items: Iterable[Any], at_once: int | None = None
) -> Iterator[Any]:
    """Yield `run(model, item)` for each item, in the items' order."""
    for item in items:
        yield run(model, item)

"""What of the loaded models each rank holds, for errors to say."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

_held: dict[int, tuple[weakref.ref[Any], Mapping[int, str]]] = {}


def note(model: Any, parts: Mapping[int, str]) -> None:
    """Note which part of something is each rank's, for as long as it lives.

    Args:
        model: the model, or its placement.
        parts: what ranks hold of it, in short: {1: "blocks.10-19, unembed"}.
    """
    key = id(model)
    _held[key] = weakref.ref(model, lambda _: _held.pop(key, None)), parts


def parts_of(rank: int) -> str:
    """What a rank holds of models, in short; "" if that is nothing."""
    parts = [parts[rank] for reference, parts in list(_held.values()) if parts.get(rank)]
    return " and ".join(dict.fromkeys(parts))  # in a load, the plan is noted beside the model


def held_by(rank: int) -> str:
    """What a rank holds, as a clause behind its name; "" if that is nothing."""
    parts = parts_of(rank)
    return f", which holds {parts}," if parts else ""

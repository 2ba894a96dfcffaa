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


def held_by(rank: int) -> str:
    """What a rank holds, as a clause behind its name; "" if that is nothing."""
    parts = [parts[rank] for reference, parts in list(_held.values()) if parts.get(rank)]
    shown = list(dict.fromkeys(parts))  # while a model is loaded, its plan is noted beside it
    return f", which holds {' and '.join(shown)}," if shown else ""

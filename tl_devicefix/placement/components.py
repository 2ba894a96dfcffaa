"""The components a model is made of: the units that are placed, and their sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ComponentSize:
    """What one component holds, in bytes."""

    name: str
    weights: int
    buffers: int
    shared: str | None = None
    """Blocks on one device that name the same here hold their buffers together, in one copy."""
    gives: int = 0
    """What it passes on for each token: of the residual stream, or logits; 0 if that is nothing."""


def component_of(name: str) -> str:
    """The component that a parameter or buffer belongs to: "blocks.3.attn.W_Q" -> "blocks.3"."""
    parts = name.split(".")
    return ".".join(parts[:2]) if is_block(name) else parts[0]


def is_block(name: str) -> bool:
    """Whether this is a block, or something in one: it has a number. All else stays at home.

    So tokens in and logits out are at home: embed, pos_embed, ln_final, unembed.
    """
    return name.partition(".")[2].partition(".")[0].isdecimal()


def check_count(name: str, count: Any) -> None:
    """Check that a model may have so many blocks, or experts: nothing is made of each before.

    Args:
        name: what a config calls them.
        count: how many there are.

    Raises:
        ValueError: if no model has so many.
    """
    if isinstance(count, int) and count > _MOST:
        raise ValueError(f"{name}={count} is more than any model has: give at most {_MOST}")


_MOST = 10_000


def shared_once(on_one_device: Sequence[Any]) -> int:
    """Bytes of the buffers of some components (anything like `ComponentSize`) on one device."""
    copies = {component.shared or component.name: component.buffers for component in on_one_device}
    return sum(copies.values())

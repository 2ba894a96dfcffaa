"""The checks of a TransformerBridge that differ from those of a HookedTransformer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from tl_devicefix.checking.places import bring_back, placement_of
from tl_devicefix.checking.report import Finding
from tl_devicefix.transformer_bridge.alignment import register_hooks, settle_bridge


def are_tied(bridge: Any, one: str, other: str) -> bool:
    """Whether two parameters of a Bridge may share memory.

    The embedding and the unembedding may, until the weights are processed, and parts of one
    attention or MLP, as q, k and v are views of GPT-2's combined weight.
    """
    heads = {one.partition(".")[0], other.partition(".")[0]}
    if heads == {"embed", "unembed"}:
        return not bridge._weights_processed
    return one.startswith("blocks.") and one.split(".")[:3] == other.split(".")[:3]


def attached(bridge: Any) -> dict[nn.Module, str]:
    """Attached modules that run where they are: a Bridge has none."""
    return {}


def hint(bridge: Any, path: str) -> str:
    """Suggest nothing more for a misplaced module."""
    return ""


def norm_findings(bridge: Any) -> Iterator[Finding]:
    """No norms: a Bridge keeps their classes when it folds them."""
    return iter(())


def put_right(bridge: Any) -> None:
    """Move what is misplaced, and make the config, the hooks and the registry of hooks follow."""
    bring_back(bridge)
    placement = placement_of(bridge)
    if placement is not None:
        settle_bridge(bridge, placement)
    register_hooks(bridge)

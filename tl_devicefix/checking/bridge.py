"""The checks of a TransformerBridge that differ from those of a HookedTransformer."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn

from tl_devicefix.checking.places import moved, placement_of, tensors
from tl_devicefix.checking.report import Finding
from tl_devicefix.dispatch.naming import listed
from tl_devicefix.transformer_bridge.alignment import register_hooks, settle_bridge

_FOLDED = ("ln1", "ln2", "ln_final")
"""The norms that folding takes into what reads them."""


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
    """Norms of a processed Bridge that still have weights, where others are folded."""
    if not bridge._weights_processed:
        return
    identity = 0.0 if getattr(bridge.cfg, "rmsnorm_uses_offset", False) else 1.0
    folded = {
        tensor.path: bool((tensor.value == identity).all())
        for tensor in tensors(bridge)
        if tensor.name == "weight" and tensor.path.rpartition(".")[2] in _FOLDED
        if not tensor.value.is_meta
    }
    left = [path for path, is_folded in folded.items() if not is_folded]
    if left and len(left) < len(folded):  # or it was processed without `fold_ln`
        message = (
            f"the weights are processed, but {listed(left)} still scales, while the other norms "
            "are folded: boot the model again, as its weights are folded in part only"
        )
        yield Finding("norms", left[0], message)


def put_right(bridge: Any) -> None:
    """Move what is misplaced, and make the config, the hooks and the registry of hooks follow."""
    for tensor in list(tensors(bridge)):
        if tensor.is_misplaced:
            ids = {id(tensor.value), id(tensor.value.grad)}
            move = partial(moved, device=tensor.planned, ids=ids)
            nn.Module._apply(tensor.module, move, recurse=False)
    placement = placement_of(bridge)
    if placement is not None:
        settle_bridge(bridge, placement)
    register_hooks(bridge)

"""Keys and values of each head, that are not repeated for the queries which share them.

A Bridge's attention repeats them, and multiplies queries with keys, in its own code. It is given
these in their place.
"""

from __future__ import annotations

from typing import Any

import torch

from tl_devicefix.attending import promises, scores
from tl_devicefix.attending.promises import Promised, after, rule
from tl_devicefix.attending.scores import Parts, can_mix, mix

AS_THEY_ARE, WITH_AN_AXIS, EXPANDED = "as they are", "with an axis", "expanded"
_AN_AXIS = (slice(None), slice(None), None, slice(None), slice(None))


class Heads(Promised):
    """Keys or values, [batch, head_index, pos, d_head], of which several heads are one."""

    source: torch.Tensor
    """[batch, kv_head_index, pos, d_head]."""
    stage: str
    groups: int
    is_transposed: bool
    is_edited: bool
    """Whether hooks get what is mixed of them."""


def promise(source: torch.Tensor, is_edited: bool = False) -> Heads:
    """Keys or values [batch, kv_head_index, pos, d_head] that are about to be repeated.

    Args:
        source: the ones that there are.
        is_edited: whether hooks get what is mixed of them, and may edit it in place.
    """
    held = {"stage": AS_THEY_ARE, "groups": 1, "is_transposed": False, "is_edited": is_edited}
    return promises.promise(
        Heads, source.shape, source.dtype, source.device, lambda: source, source=source, **held
    )


def _is_plain(heads: Any) -> bool:
    return heads.stage == AS_THEY_ARE and not heads.is_transposed


@rule(Heads, torch.Tensor.__getitem__)
def _with_an_axis(heads: Any, key: Any) -> Any:
    """The first step of transformers' `repeat_kv`."""
    if not _is_plain(heads) or heads.groups != 1 or key != _AN_AXIS:
        return NotImplemented
    batch, n, pos, width = heads.shape
    return after(heads, lambda k: k[key], (batch, n, 1, pos, width), stage=WITH_AN_AXIS)


@rule(Heads, torch.Tensor.expand)
def _expand(heads: Any, *shape: Any) -> Any:
    if heads.stage != WITH_AN_AXIS or len(shape) != 5:
        return NotImplemented
    batch, n, groups, pos, width = shape
    if (batch, n, 1, pos, width) != tuple(heads.shape):
        return NotImplemented
    return after(heads, lambda k: k.expand(*shape), shape, stage=EXPANDED, groups=groups)


@rule(Heads, torch.Tensor.reshape)
def _reshape(heads: Any, *shape: Any) -> Any:
    if heads.stage != EXPANDED:
        return NotImplemented
    batch, n, groups, pos, width = heads.shape
    if shape != (batch, n * groups, pos, width):
        return NotImplemented
    return after(heads, lambda k: k.reshape(*shape), shape, stage=AS_THEY_ARE)


@rule(Heads, torch.Tensor.repeat_interleave)
def _repeat(heads: Any, repeats: Any, dim: Any = None) -> Any:
    if not _is_plain(heads) or heads.groups != 1 or not isinstance(repeats, int) or dim != 1:
        return NotImplemented
    batch, n, pos, width = heads.shape
    return after(
        heads,
        lambda k: k.repeat_interleave(repeats, dim=1),
        (batch, n * repeats, pos, width),
        groups=repeats,
    )


@rule(Heads, torch.Tensor.transpose)
def _transpose(heads: Any, one: int, other: int) -> Any:
    if not _is_plain(heads) or {one % 4, other % 4} != {2, 3}:
        return NotImplemented
    batch, n, pos, width = heads.shape
    step = lambda k: k.transpose(one, other)  # noqa: E731
    return after(heads, step, (batch, n, width, pos), is_transposed=True)


@rule(Heads, torch.matmul, torch.Tensor.matmul, at=1)
def _matmul(one: Any, heads: Any, **options: Any) -> Any:
    """Queries by keys: scores; a pattern by values: what is mixed by it."""
    if heads.stage != AS_THEY_ARE or options:
        return NotImplemented
    if heads.is_transposed and not isinstance(one, Promised):
        q, k = one, heads.source
        if q.dim() != 4 or q.shape[:2] != heads.shape[:2] or q.shape[3] != k.shape[3]:
            return NotImplemented
        if q.dtype != k.dtype or q.device != k.device:
            return NotImplemented
        return scores.promise(Parts(q, k, 1.0), lambda: torch.matmul(q, promises.build(heads)))
    if not heads.is_transposed and can_mix(one, heads.source):
        return mix(one, heads.source, heads.is_edited)
    return NotImplemented

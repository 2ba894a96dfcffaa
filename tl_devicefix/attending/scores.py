"""Attention scores, and the pattern made of them, that are not built unless someone looks.

TransformerLens's forward goes on with them as with the tensors that they stand for: a causal mask,
biases, a softmax. Where it mixes values by the pattern, `scaled_dot_product_attention` does all of
that at once. Anything else that is done to them builds them, by the same steps as ever.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F

from tl_devicefix.attending import promises
from tl_devicefix.attending.fused import attend
from tl_devicefix.attending.masks import Causal
from tl_devicefix.attending.promises import Promised, Step, after, rule

SCORES, PATTERN, IS_NAN, ZEROS = "scores", "pattern", "is nan", "zeros"


@dataclass(frozen=True)
class Parts:
    """What scores are made of."""

    q: torch.Tensor
    """[batch, head_index, query_pos, d_head]."""
    k: torch.Tensor
    """[batch, kv_head_index, key_pos, d_head]."""
    scale: float
    causal: Causal | None = None
    biases: tuple[torch.Tensor, ...] = ()


class Scores(Promised):
    """Scores or a pattern, [batch, head_index, query_pos, key_pos]."""

    parts: Parts
    kind: str
    of: Scores | None
    """Of which pattern it says what is NaN."""


def promise(parts: Parts, first: Any) -> Scores:
    """Scores that are not built.

    Args:
        parts: what they are made of.
        first: makes them, as TransformerLens does.
    """
    q, k = parts.q, parts.k
    shape = (*q.shape[:3], k.shape[2])
    return promises.promise(
        Scores, shape, q.dtype, q.device, first, parts=parts, kind=SCORES, of=None
    )


def is_promise(value: Any) -> TypeGuard[Scores]:
    """Whether these are scores or a pattern without values."""
    return promises.is_promise(value, Scores)


def see(
    scores: Scores, step: Step, causal: Causal | None, biases: tuple[torch.Tensor, ...] = ()
) -> Scores:
    """Scores with a mask.

    Args:
        scores: without values.
        step: applies the mask to scores with values.
        causal: which keys are seen; all if None.
        biases: what the mask adds.
    """
    parts = scores.parts
    parts = replace(parts, causal=causal, biases=(*parts.biases, *biases))
    return after(scores, step, parts=parts)


def soften(
    scores: torch.Tensor, step: Step | None = None, dtype: torch.dtype | None = None
) -> Scores:
    """The pattern of scores without values.

    Args:
        scores: masked.
        step: makes it of scores with values; a softmax, if None.
        dtype: its dtype, if that is another.
    """
    assert isinstance(scores, Scores)
    step = step or (lambda values: F.softmax(values, dim=-1, dtype=dtype))
    return after(scores, step, dtype=dtype, kind=PATTERN)


def mix(pattern: Scores, v: torch.Tensor, is_edited: bool = False) -> torch.Tensor:
    """The values of each head mixed by a pattern: [batch, head_index, query_pos, d_head].

    Args:
        pattern: without values, after its softmax.
        v: [batch, kv_head_index, key_pos, d_head].
        is_edited: whether hooks get it, which edit in place: SDPA's backward needs its result.
    """
    parts = pattern.parts
    z = attend(parts.q, parts.k, v, parts.scale, parts.causal, parts.biases)
    return z.clone() if is_edited and z.requires_grad else z


def can_mix(pattern: Any, v: torch.Tensor) -> TypeGuard[Scores]:
    """Whether `mix` can."""
    if not is_promise(pattern) or pattern.kind != PATTERN:
        return False
    k = pattern.parts.k
    fits = v.shape[:3] == k.shape[:3] and v.dtype == pattern.dtype
    return bool(fits and v.device == k.device == pattern.device)


@rule(Scores, torch.Tensor.add_)
def _add_in_place(scores: Any, bias: Any, **options: Any) -> Any:
    if options or not _takes(scores, bias):
        return NotImplemented
    scores.parts = replace(scores.parts, biases=(*scores.parts.biases, bias))
    scores._steps.append(lambda values: values.add_(bias))
    return scores


@rule(Scores, torch.Tensor.add)
def _add(scores: Any, bias: Any, **options: Any) -> Any:
    if options or not _takes(scores, bias):
        return NotImplemented
    if torch.promote_types(scores.dtype, bias.dtype) != scores.dtype:
        return NotImplemented
    parts = replace(scores.parts, biases=(*scores.parts.biases, bias))
    return after(scores, lambda values: values + bias, parts=parts)


def _takes(scores: Any, bias: Any) -> bool:
    """Whether scores take a bias: one for all that it is broadcast to, and no part of a graph."""
    if scores.kind != SCORES:
        return False
    if not isinstance(bias, torch.Tensor) or isinstance(bias, Promised):
        return False
    if bias.device != scores.device or not bias.is_floating_point() or bias.requires_grad:
        return False
    return bias.dim() <= 4 and torch.broadcast_shapes(bias.shape, scores.shape) == scores.shape


@rule(Scores, torch.Tensor.mul)
def _scale(scores: Any, factor: Any) -> Any:
    is_new = scores.kind == SCORES and not scores.parts.biases
    if not is_new or not isinstance(factor, (int, float)) or scores.parts.causal is not None:
        return NotImplemented
    if not factor > 0:
        return NotImplemented
    parts = replace(scores.parts, scale=scores.parts.scale * factor)
    return after(scores, lambda values: values * factor, parts=parts)


@rule(Scores, F.softmax)
def _softmax(scores: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
    if scores.kind != SCORES or dim not in (-1, 3):
        return NotImplemented
    return soften(scores, dtype=dtype)


@rule(Scores, F.dropout)
def _keep(pattern: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    return NotImplemented if training and p > 0 else pattern


@rule(Scores, torch.isnan)
def _is_nan(pattern: Any) -> Any:
    if pattern.kind != PATTERN:
        return NotImplemented
    return after(pattern, torch.isnan, dtype=torch.bool, kind=IS_NAN, of=pattern)


@rule(Scores, torch.zeros_like)
def _zeros_like(pattern: Any, **options: Any) -> Any:
    if options:
        return NotImplemented
    return after(pattern, torch.zeros_like, kind=ZEROS)


@rule(Scores, torch.where)
def _where(condition: Any, value: Any = None, other: Any = None, **options: Any) -> Any:
    """Take a pattern without its NaNs, which are of queries that see no key."""
    if not isinstance(value, Scores) or options:
        return NotImplemented
    pattern = condition.of
    if condition.kind != IS_NAN or value.kind != ZEROS or pattern is None or pattern is not other:
        return NotImplemented
    return after(
        pattern, lambda values: torch.where(torch.isnan(values), torch.zeros_like(values), values)
    )


@rule(Scores, torch.Tensor.to)
def _to(pattern: Any, *args: Any, **kwargs: Any) -> Any:
    """Convert a pattern that stays on its device."""
    if pattern.kind != PATTERN:
        return NotImplemented
    wanted = dict(kwargs)
    for each in args:
        wanted["dtype" if isinstance(each, torch.dtype) else "device"] = each
    if len(args) + len(kwargs) != len(wanted) or wanted.keys() - {"dtype", "device"}:
        return NotImplemented
    if wanted.get("device", pattern.device) != pattern.device:
        return NotImplemented
    if wanted.get("dtype", pattern.dtype) == pattern.dtype:
        return pattern
    return after(pattern, lambda values: values.to(*args, **kwargs), dtype=wanted["dtype"])


@rule(Scores, torch.Tensor.matmul, torch.matmul)
def _matmul(pattern: Any, v: Any, **options: Any) -> Any:
    if isinstance(v, Promised) or v.dim() != 4 or options or not can_mix(pattern, v):
        return NotImplemented
    return mix(pattern, v)

"""Attention scores, and the pattern made of them, that are not built unless someone looks.

TransformerLens's forward goes on with them as with the tensors that they stand for: a causal mask,
biases, a softmax. Where it mixes values by the pattern, `scaled_dot_product_attention` does all of
that at once. Anything else that is done to them builds them, by the same steps as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map_only

from tl_devicefix.attending.fused import attend
from tl_devicefix.attending.masks import Causal

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


@dataclass
class _Promise:
    """How scores come to be, if they have to."""

    parts: Parts
    kind: str
    first: Callable[[], torch.Tensor]
    steps: list[Callable[[torch.Tensor], torch.Tensor]] = field(default_factory=list)
    of: Scores | None = None
    built: torch.Tensor | None = None


class Scores(torch.Tensor):
    """Scores or a pattern, [batch, head_index, query_pos, key_pos], without values until asked."""

    _promise: _Promise

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Build what an operation from C++ is given."""
        return func(*_built(args), **_built(kwargs or {}))

    @classmethod
    def __torch_function__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Do what can be done without values; build them for anything else."""
        kwargs = kwargs or {}
        if func in _OF_SHAPES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        rule = _RULES.get(func)
        if rule is not None and not any(map(_is_built, args)):
            result = rule(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return func(*_built(args), **_built(kwargs))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Show the values."""
        return repr(build(self))


def promise(
    shape: torch.Size, dtype: torch.dtype, parts: Parts, build: Callable[[], torch.Tensor]
) -> Scores:
    """Scores that are not built.

    Args:
        shape: theirs: [batch, head_index, query_pos, key_pos].
        dtype: theirs.
        parts: what they are made of.
        build: makes them, as TransformerLens does.
    """
    return _scores(shape, dtype, parts.q.device, _Promise(parts, SCORES, build))


def build(scores: torch.Tensor) -> torch.Tensor:
    """The tensor that scores stand for, made now unless it has been; any other as it is."""
    if not isinstance(scores, Scores):
        return scores
    promised = scores._promise
    if promised.built is None:
        built = promised.first()
        for step in promised.steps:
            built = step(built)
        promised.built = built
    return promised.built


def is_promise(value: Any) -> TypeGuard[Scores]:
    """Whether these are scores or a pattern without values."""
    return isinstance(value, Scores) and value._promise.built is None


def see_up_to(scores: Scores, causal: Causal, step: Callable[..., torch.Tensor]) -> Scores:
    """Scores with a causal mask.

    Args:
        scores: without values.
        causal: the mask.
        step: applies it to scores with values.
    """
    return _after(scores, step, parts=replace(scores._promise.parts, causal=causal))


def mix(pattern: Scores, v: torch.Tensor) -> torch.Tensor:
    """The values of each head mixed by a pattern: [batch, head_index, query_pos, d_head].

    Args:
        pattern: without values, after its softmax.
        v: [batch, kv_head_index, key_pos, d_head].
    """
    parts = pattern._promise.parts
    return attend(parts.q, parts.k, v, parts.scale, parts.causal, parts.biases)


def can_mix(pattern: Any, v: torch.Tensor) -> TypeGuard[Scores]:
    """Whether `mix` can."""
    if not is_promise(pattern) or pattern._promise.kind != PATTERN:
        return False
    k = pattern._promise.parts.k
    return bool(v.shape[:3] == k.shape[:3] and v.device == k.device == pattern.device)


def _scores(
    shape: torch.Size, dtype: torch.dtype, device: torch.device, promised: _Promise
) -> Scores:
    scores: Scores = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
        Scores, shape, dtype=dtype, device=device
    )
    scores._promise = promised
    return scores


def _after(
    scores: Scores,
    step: Callable[..., torch.Tensor],
    kind: str | None = None,
    parts: Parts | None = None,
    dtype: torch.dtype | None = None,
    of: Scores | None = None,
) -> Scores:
    """What a step makes of scores."""
    known = scores._promise
    promised = _Promise(
        parts or known.parts, kind or known.kind, known.first, [*known.steps, step], of
    )
    return _scores(scores.shape, dtype or scores.dtype, scores.device, promised)


def _is_built(value: Any) -> bool:
    return isinstance(value, Scores) and value._promise.built is not None


def _built(values: Any) -> Any:
    return tree_map_only(Scores, build, values)


def _add_in_place(scores: Any, bias: Any, **options: Any) -> Any:
    promised = scores._promise if isinstance(scores, Scores) else None
    if promised is None or promised.kind != SCORES or options or not _is_bias(bias, scores):
        return NotImplemented
    parts = promised.parts
    promised.parts = replace(parts, biases=(*parts.biases, bias))
    promised.steps.append(lambda built: built.add_(bias))
    return scores


def _is_bias(bias: Any, scores: Scores) -> bool:
    if not isinstance(bias, torch.Tensor) or isinstance(bias, Scores):
        return False
    if bias.device != scores.device or not bias.is_floating_point() or bias.requires_grad:
        return False
    return bias.dim() <= 4 and torch.broadcast_shapes(bias.shape, scores.shape) == scores.shape


def _softmax(scores: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
    if scores._promise.kind != SCORES or dim not in (-1, 3) or dtype is not None:
        return NotImplemented
    return _after(scores, lambda built: F.softmax(built, dim=-1), PATTERN)


def _is_nan(pattern: Any) -> Any:
    if pattern._promise.kind != PATTERN:
        return NotImplemented
    return _after(pattern, torch.isnan, IS_NAN, dtype=torch.bool, of=pattern)


def _zeros_like(pattern: Any, **options: Any) -> Any:
    if options:
        return NotImplemented
    return _after(pattern, torch.zeros_like, ZEROS)


def _where(condition: Any, value: Any = None, other: Any = None, **options: Any) -> Any:
    """Take a pattern without its NaNs, which are of queries that see no key."""
    if not (isinstance(condition, Scores) and isinstance(value, Scores)):
        return NotImplemented
    nan, zeros = condition._promise, value._promise
    if nan.kind != IS_NAN or nan.of is None or nan.of is not other or zeros.kind != ZEROS:
        return NotImplemented
    return _after(
        nan.of, lambda built: torch.where(torch.isnan(built), torch.zeros_like(built), built)
    )


def _to(pattern: Any, *args: Any, **kwargs: Any) -> Any:
    """Convert a pattern that stays on its device."""
    wanted = dict(kwargs)
    for each in args:
        wanted["dtype" if isinstance(each, torch.dtype) else "device"] = each
    if len(args) + len(kwargs) != len(wanted) or wanted.keys() - {"dtype", "device"}:
        return NotImplemented
    device, dtype = wanted.get("device"), wanted.get("dtype") or pattern.dtype
    if (device is not None and device != pattern.device) or pattern._promise.kind != PATTERN:
        return NotImplemented
    return _after(pattern, lambda built: built.to(*args, **kwargs), dtype=dtype)


def _matmul(pattern: Any, v: Any, **options: Any) -> Any:
    if isinstance(v, Scores) or v.dim() != 4 or options or not can_mix(pattern, v):
        return NotImplemented
    return mix(pattern, v)


_RULES: dict[Any, Callable[..., Any]] = {
    torch.Tensor.add_: _add_in_place,
    F.softmax: _softmax,
    torch.isnan: _is_nan,
    torch.zeros_like: _zeros_like,
    torch.where: _where,
    torch.Tensor.to: _to,
    torch.Tensor.matmul: _matmul,
    torch.matmul: _matmul,
}
"""What is done to scores and patterns without building them."""

_READ = ("shape", "dtype", "device", "ndim", "layout", "is_meta", "is_sparse", "is_nested")
_OF_SHAPES = frozenset(
    (
        *(getattr(torch.Tensor, name).__get__ for name in _READ),
        *(torch.Tensor.size, torch.Tensor.dim, torch.Tensor.ndimension, torch.Tensor.numel),
        *(torch.Tensor.is_floating_point, torch.Tensor.is_complex, torch.Tensor.__len__),
    )
)
"""What asks nothing but shape, dtype and device."""

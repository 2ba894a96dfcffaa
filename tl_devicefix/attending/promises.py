"""Tensors that are not built unless someone looks.

What is done to one by a known rule makes another one; anything else builds it, by the very steps
that led to it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeGuard, TypeVar

import torch
from torch.utils._pytree import tree_map_only

Step = Callable[..., torch.Tensor]
P = TypeVar("P", bound="Promised")


class Promised(torch.Tensor):
    """A tensor with shape, dtype and device, and without values until asked."""

    _first: Callable[[], torch.Tensor]
    _steps: list[Step]
    _made: torch.Tensor | None

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
        if not any(map(_is_built, args)):
            for rule in RULES.get(func, ()):
                result = rule.do(args, kwargs) if rule.is_for(args, kwargs) else NotImplemented
                if result is not NotImplemented:
                    return result
        return func(*_built(args), **_built(kwargs))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Show the values."""
        return repr(build(self))


class Rule:
    """How a function of torch is done without values.

    Args:
        cls: of which promises.
        known: does it, or returns NotImplemented.
        at: which of the arguments is such a promise.
    """

    def __init__(self, cls: type, known: Callable[..., Any], at: int) -> None:
        self._cls, self._known, self._at = cls, known, at
        self._takes = functools.lru_cache(functools.partial(_takes, inspect.signature(known)))

    def is_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether it knows what is done to such arguments, named or not."""
        if len(args) <= self._at or not isinstance(args[self._at], self._cls):
            return False
        return self._takes(len(args), *kwargs)

    def do(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do it, or return NotImplemented."""
        return self._known(*args, **kwargs)


def _takes(signature: inspect.Signature, unnamed: int, *named: str) -> bool:
    """Whether a function takes so many arguments without names, and these by name."""
    try:
        signature.bind(*[None] * unnamed, **dict.fromkeys(named))
    except TypeError:
        return False
    return True


RULES: dict[Any, list[Rule]] = {}
"""A function -> what does it without values."""


def rule(
    cls: type, *functions: Any, at: int = 0
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a rule for functions of torch.

    Args:
        cls: the class of promises that it is for.
        functions: of torch.
        at: which of their arguments is such a promise.
    """

    def register(known: Callable[..., Any]) -> Callable[..., Any]:
        for function in functions:
            RULES.setdefault(function, []).append(Rule(cls, known, at))
        return known

    return register


def promise(
    cls: type[P],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    first: Callable[[], torch.Tensor],
    **held: Any,
) -> P:
    """A tensor that is not built.

    Args:
        cls: its class.
        shape: its shape.
        dtype: its dtype.
        device: its device.
        first: makes it, if it has to be.
        held: what else is known of it, by attributes.
    """
    return _make(cls, shape, dtype, device, first, [], held)


def after(
    promised: P,
    step: Step,
    shape: tuple[int, ...] | None = None,
    dtype: torch.dtype | None = None,
    **held: Any,
) -> P:
    """What a step makes of one: another, of the same class.

    Args:
        promised: the one.
        step: makes it of the values.
        shape: its shape, if that is another.
        dtype: its dtype, if that is another.
        held: what is known of it that is otherwise.
    """
    known = {name: value for name, value in vars(promised).items() if name not in _OWN}
    return _make(
        type(promised),
        promised.shape if shape is None else shape,
        dtype or promised.dtype,
        promised.device,
        promised._first,
        [*promised._steps, step],
        {**known, **held},
    )


_OWN = ("_first", "_steps", "_made")


def _make(
    cls: type[P],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    first: Callable[[], torch.Tensor],
    steps: list[Step],
    held: dict[str, Any],
) -> P:
    made: P = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
        cls, shape, dtype=dtype, device=device
    )
    vars(made).update(held, _first=first, _steps=steps, _made=None)
    return made


def build(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that one stands for, made now unless it has been; any other as it is."""
    if not isinstance(tensor, Promised):
        return tensor
    if tensor._made is None:
        values = tensor._first()
        for step in tensor._steps:
            values = step(values)
        tensor._made = values
    return tensor._made


def is_promise(value: Any, cls: type[P]) -> TypeGuard[P]:
    """Whether it is a tensor of this class without values."""
    return isinstance(value, cls) and value._made is None


def _is_built(value: Any) -> bool:
    return isinstance(value, Promised) and value._made is not None


def _built(values: Any) -> Any:
    return tree_map_only(Promised, build, values)


_READ = ("shape", "dtype", "device", "ndim", "layout", "is_meta", "is_sparse", "is_nested")
_OF_SHAPES = frozenset(
    (
        *(getattr(torch.Tensor, name).__get__ for name in _READ),
        *(torch.Tensor.size, torch.Tensor.dim, torch.Tensor.ndimension, torch.Tensor.numel),
        *(torch.Tensor.is_floating_point, torch.Tensor.is_complex, torch.Tensor.__len__),
    )
)
"""What asks nothing but shape, dtype and device."""

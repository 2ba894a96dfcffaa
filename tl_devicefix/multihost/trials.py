"""A block run once without values, which tells whether its rank may run it, and what that uses.

What depends on values is tried both ways. A block that draws random numbers, that changes what is
set in it, or of which torch cannot tell, is run operation by operation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tl_devicefix.multihost.caching import Key, Layout, layout_of, noting
from tl_devicefix.multihost.far_devices import draws
from tl_devicefix.multihost.graphs import Graph, called
from tl_devicefix.multihost.snapshots import Attributes, tensors_of
from tl_devicefix.simulation.geometry import Geometry, geometry_of

aten = torch.ops.aten


class Trial(NamedTuple):
    """What a block needs of what it is given, and of its own.

    Attributes:
        used: what gets gradients, of what asks for them.
        read: what a backward reads.
    """

    used: tuple[Key, ...]
    read: tuple[Key, ...]


def tried(
    make: Callable[[], nn.Module],
    given: dict[str, Any],
    entry: tuple[Any, ...] | None,
    wanted: tuple[Key, ...],
    outputs: list[Geometry],
) -> Trial | None:
    """Whether a block may be run whole; None if not.

    Args:
        make: gives the block, without values.
        given: its arguments, without values.
        entry: class, keys, values of a KV cache's entry, and whether it is frozen.
        wanted: what asks for gradients.
        outputs: what it is to give.
    """
    found = []
    for answer in (True, False):
        questions = _Questions(answer)
        try:
            found.append(_try(make(), given, entry, wanted, outputs, questions))
        except Exception:  # noqa: BLE001  # that torch has no rule; a true error comes again
            return None
        if not questions.were_asked:
            return found[0]
    one, other = found
    if one is None or other is None or one.used != other.used:
        return None
    return Trial(one.used, tuple(dict.fromkeys((*one.read, *other.read))))


def _try(
    block: nn.Module,
    given: dict[str, Any],
    entry: tuple[Any, ...] | None,
    wanted: tuple[Key, ...],
    outputs: list[Geometry],
    questions: _Questions,
) -> Trial | None:
    before, own = Attributes(block), tensors_of(block)
    tensors: dict[Key, torch.Tensor] = dict(enumerate(own))
    tensors |= {key: each for key, each in given.items() if isinstance(each, torch.Tensor)}
    versions = [each._version for each in tensors.values()]
    read: set[int] = set()

    def noted(tensor: torch.Tensor) -> torch.Tensor:
        read.add(_storage(tensor))
        return tensor

    used: tuple[Key, ...] = ()
    with _without_modes(), torch.inference_mode(False), questions:
        if wanted:
            with torch.autograd.graph.saved_tensors_hooks(noted, lambda each: each):
                graph = Graph(block, given, wanted)
            made = [graph.output]
            found = graph.backward(torch.empty_like(graph.output), range(len(wanted)))
            used = tuple(key for key, each in zip(wanted, found) if each is not None)
        else:
            with torch.no_grad():
                made = called(block, given, entry)
    is_changed = not before.hold() or versions != [each._version for each in tensors.values()]
    is_new = not {*map(_storage, made)} & {*map(_storage, tensors.values())}
    if questions.drew or is_changed or not is_new or list(map(geometry_of, made)) != outputs:
        return None
    return Trial(used, tuple(key for key, each in tensors.items() if _storage(each) in read))


def laid_out(block: nn.Module, given: dict[str, Any], points: tuple[int, ...]) -> Layout | None:
    """How what a block gives, and what hook points are called with, lies; None if not known.

    Args:
        block: without values.
        given: its arguments, without values.
        points: which hook points.
    """
    known: dict[Key, torch.Tensor] = dict(enumerate(tensors_of(block)))
    known |= {name: each for name, each in given.items() if isinstance(each, torch.Tensor)}
    try:
        with _without_modes(), torch.no_grad(), noting(block, points) as called_with:
            return layout_of(block(**given), called_with, known)
    except Exception:  # noqa: BLE001  # that torch has no rule, or values are asked for
        return None


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _Questions(TorchDispatchMode):
    """Answers what operations ask of values, always alike, and notes whether any was asked.

    Args:
        answer: whether what is asked for is true.

    Attributes:
        were_asked: whether any was.
        drew: whether random numbers were drawn.
    """

    def __init__(self, answer: bool) -> None:
        super().__init__()
        self._answer = answer
        self.were_asked = self.drew = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.drew = self.drew or draws(func, args, kwargs or {})
        answer = _ANSWERS.get(func)
        if answer is None:
            return func(*args, **kwargs or {})
        self.were_asked = True
        return answer(self._answer, args[0])


_ANSWERS: dict[Any, Callable[[bool, torch.Tensor], Any]] = {
    aten._local_scalar_dense.default: lambda answer, of: answer,
    aten.is_nonzero.default: lambda answer, of: answer,
    aten.equal.default: lambda answer, of: answer,
    aten.nonzero.default: lambda answer, of: of.new_empty(
        (of.numel() if answer else 0, of.dim()), dtype=torch.long
    ),
}
"""What each operation gives whose result depends on values."""


@contextlib.contextmanager
def _without_modes() -> Iterator[None]:
    """Without modes for torch functions, which are not the rank's."""
    there = range(torch._C._len_torch_function_stack())
    modes = [torch._C._pop_torch_function_stack() for _ in there]
    try:
        yield
    finally:
        for each in reversed(modes):
            torch._C._push_on_torch_function_stack(each)

"""What a block, or one of its components, makes of the residual stream, run whole where it is.

With gradients, the rank holds the graph of the block, and a backward through it is one command too:
on rank 0, all of it is one node of autograd's graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tl_devicefix.multihost.caching import Key, noting, tensor_in
from tl_devicefix.multihost.classes import is_as_imported
from tl_devicefix.multihost.graphs import Graph, called
from tl_devicefix.multihost.modules import HeldBlock, HeldCopy, held
from tl_devicefix.multihost.peers import Owner
from tl_devicefix.simulation.backward import delayed_interrupts
from tl_devicefix.simulation.geometry import Geometry, geometry_of
from tl_devicefix.simulation.tensor import SimTensor


def run_whole(
    block: Any, given: dict[str, Any], entry: Any, run_here: Callable[..., torch.Tensor]
) -> torch.Tensor | None:
    """What a block gives, of the shape of the residual stream.

    Args:
        block: a block, or one of its components.
        given: its arguments by name, the first of which is the residual stream or what is read of
            it, [batch, pos, d_model] or [batch, pos, head_index, d_model].
        entry: of a KV cache, to which it appends.
        run_here: its forward, operation by operation.

    Returns:
        None if its operations must be run one by one.
    """
    residual = next(iter(given.values()))
    found = held(block, residual)
    # Of another dtype, or lying otherwise, it would give another one.
    if found is None or residual.dtype != block.cfg.dtype or not residual.is_contiguous():
        return None
    tensors = {name: each for name, each in given.items() if isinstance(each, torch.Tensor)}
    if any(each.device != found.device for each in tensors.values()):
        return None
    everything: dict[Key, torch.Tensor] = {}
    wanted: tuple[Key, ...] = ()
    if torch.is_grad_enabled():
        everything.update(enumerate(found.seen.tensors))
        everything.update(tensors)
        wanted = tuple(key for key, each in everything.items() if each.requires_grad)
        if wanted and found.points:
            return None
    found.far.wait_for_room(found.there.rank)
    with delayed_interrupts():  # or autograd may be left without gradients, or with hooks
        if wanted:
            return _with_gradients(found, given, everything, wanted, entry, run_here)
        if found.points:
            return None if entry is not None else _cached(found, given, residual)
        return _without_gradients(found, given, residual, entry)


def _cpu(given: dict[str, Any]) -> dict[str, Any]:
    return {name: each._cpu if type(each) is SimTensor else each for name, each in given.items()}


def _output(given: Any) -> Geometry:
    """Of what a block gives: the shape of the residual stream."""
    batch, pos, *_, d_model = given.shape
    return _contiguous((batch, pos, d_model), given.dtype)


def _contiguous(shape: Any, dtype: torch.dtype) -> Geometry:
    return Geometry(torch.Size(shape), torch.empty(shape, device="meta").stride(), dtype)


def _without_gradients(
    found: HeldBlock, given: dict[str, Any], residual: SimTensor, entry: Any
) -> torch.Tensor | None:
    there, cpu = found.there, _cpu(given)
    past, outputs = None, [_output(residual)]
    if entry is not None:
        keys, values = entry.past_keys, entry.past_values
        if not (keys.device == values.device == found.device and is_as_imported(type(entry))):
            return None
        past = type(entry), keys._cpu, values._cpu, entry.frozen
        if not entry.frozen:
            for each in past[1:3]:
                batch, length, *heads = each.shape
                shape = batch, length + residual.shape[1], *heads
                outputs.append(_contiguous(shape, each.dtype))
    if there.trial(cpu, past, (), outputs) is None:
        return None
    if there.rank:
        gives = [found.far.promise(each, there.rank) for each in outputs]
        found.far.call(there.rank, there.number, cpu, past, gives)
    else:
        with torch.no_grad():
            gives = called(there.copy(), cpu, past)
    made = [there.wrapped(each) for each in gives]
    if len(made) > 1:
        entry.past_keys, entry.past_values = made[1:]
    return made[0]


def _cached(found: HeldBlock, given: dict[str, Any], residual: SimTensor) -> torch.Tensor | None:
    """What a block gives, to whose hook points caching hooks listen, which are called after it."""
    there, cpu = found.there, _cpu(given)
    if there.trial(cpu, None, (), [_output(residual)]) is None:
        return None
    if there.rank:
        layout = there.layout(cpu, found.points)
        if layout is None:
            return None
        new = there.far.call_cached(there.rank, there.number, cpu, layout)
        known: dict[Key, Any] = dict(enumerate(found.seen.tensors))
        known.update(given)
        made = [
            tensor_in(new[-1 - part.of].untyped_storage(), part)
            if type(part.of) is int and part.of < 0
            else known[part.of]._cpu.as_strided(
                part.shape, part.stride, known[part.of]._cpu.storage_offset() + part.offset
            )
            for part in layout.parts
        ]
        points = layout.points
    else:
        block = there.copy(found.points)
        with torch.no_grad(), noting(block, found.points) as called_with:
            made = [block(**cpu)]
        made += [each for _, each in called_with]
        points = tuple(index for index, _ in called_with)
    output, *kept = map(there.wrapped, made)
    for index, each in zip(points, kept, strict=True):
        found.seen.points[index](each)
    return output


def _with_gradients(
    found: HeldBlock,
    given: dict[str, Any],
    everything: dict[Key, torch.Tensor],
    wanted: tuple[Key, ...],
    entry: Any,
    run_here: Callable[..., torch.Tensor],
) -> torch.Tensor | None:
    if entry is not None or torch.is_anomaly_enabled() or _saves_by_hooks():
        return None
    output = _output(next(iter(given.values())))
    trial = found.there.trial(_cpu(given), None, wanted, [output])
    if trial is None:
        return None
    used = (everything[key] for key in trial.used)
    read = {key: everything[key] for key in trial.read}
    made: torch.Tensor = _Whole.apply(found, given, run_here, trial.used, read, output, *used)
    return made


def _saves_by_hooks() -> bool:
    """Within `torch.autograd.graph.saved_tensors_hooks`, which see what operations save."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


class _Whole(torch.autograd.Function):
    """A block's forward and backward, each run whole where the block is."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, found: HeldBlock, given: Any, run_here: Any, used: Any, read: Any, output: Any,
        *wanted: Any,
    ) -> Any:  # fmt: skip
        ctx.found, ctx.run_here, ctx.used = found, run_here, used
        ctx.given = {name: each for name, each in given.items() if name not in used}
        # Also frozen weights; but a bias may be changed before the backward, as nothing reads it.
        ctx.save_for_backward(*read.values())
        ctx.read = tuple(read)
        ctx.unread = {key: each for key, each in zip(used, wanted) if key not in read}
        there, cpu = found.there, _cpu(given)
        if there.rank:
            made = found.far.promise(output, there.rank)
            ctx.graph = _FarGraph(there, cpu, used, wanted, made)
        else:
            ctx.graph = Graph(there.copy(), cpu, used)
            made = ctx.graph.output
        return there.wrapped(made)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:  # type: ignore[override]
        wanted = _wanted(ctx)
        needed = ctx.needs_input_grad[6:]
        if torch.is_grad_enabled():  # for gradients of gradients
            return *[None] * 6, *_again(ctx, wanted, needed, gradient)
        which = tuple(index for index, is_needed in enumerate(needed) if is_needed)
        keeps = torch._C._autograd._get_current_graph_task_keep_graph()
        found = ctx.graph.backward(gradient._cpu, which, keeps)
        gradients = dict(zip(which, map(ctx.found.there.wrapped, found)))
        return *[None] * 6, *(gradients.get(index) for index in range(len(wanted)))


def _wanted(ctx: Any) -> list[torch.Tensor]:
    """What asks for gradients.

    Raises:
        RuntimeError: if what is read was changed, or there was a backward before.
    """
    there = {**ctx.unread, **dict(zip(ctx.read, ctx.saved_tensors))}
    return [there[key] for key in ctx.used]


def _again(ctx: Any, wanted: Any, needed: Any, gradient: torch.Tensor) -> list[Any]:
    """Gradients that have gradients themselves: the block's operations are run one by one.

    Raises:
        RuntimeError: if it would be another block's.
    """
    seen = ctx.found.seen
    if seen.listened() != () or not seen.holds():
        raise RuntimeError(
            f"{seen.name} was changed, or got hooks, between a forward and a backward for gradients"
            " of gradients, which runs it again: change it before the forward, or after both"
        )
    given = {**ctx.given, **{key: each for key, each in zip(ctx.used, wanted) if type(key) is str}}
    inputs = [each for each, is_needed in zip(wanted, needed) if is_needed]
    found = iter(
        torch.autograd.grad(
            ctx.run_here(**given), inputs, gradient, create_graph=True, allow_unused=True
        )
    )
    return [next(found) if is_needed else None for is_needed in needed]


class _FarGraph:
    """A `Graph` that another rank holds, until this is let go.

    Args:
        there: the block.
        given: its arguments, as they are there.
        keys: of what asks for gradients.
        wanted: that itself.
        output: what it will have given.
    """

    def __init__(
        self,
        there: HeldCopy,
        given: dict[str, Any],
        keys: tuple[Key, ...],
        wanted: Sequence[SimTensor],
        output: torch.Tensor,
    ) -> None:
        self._there = there
        self._owner: Owner | None = there.far.owner(there.rank)
        self._number = self._owner.number
        # As parameters lie: autograd copies a gradient that lies otherwise.
        self._like = [geometry_of(torch.empty_like(each._cpu)) for each in wanted]
        there.far.record(there.rank, self._number, there.number, given, keys, output)

    def backward(
        self, gradient: torch.Tensor, which: tuple[int, ...], keeps: bool
    ) -> list[torch.Tensor]:
        """Gradients of some of the tensors that ask for them, which the rank is told to make."""
        far, rank = self._there.far, self._there.rank
        gives = [far.promise(self._like[each], rank) for each in which]
        far.backward(rank, self._number, gradient, which, keeps, gives)
        if not keeps:
            self._owner = None
        return gives

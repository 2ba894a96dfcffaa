"""Blocks that a rank runs by one command, forward and backward.

The rank first runs a block on trial: what keeps something in its modules, draws random numbers, or
returns more than the residual stream is run operation by operation, and so is a block with anything
in it that other ranks may not have. With gradients, the rank holds the graph, which is one node of
autograd's here.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _len_torch_dispatch_stack

from tl_devicefix.attention.kv_cache import CacheOfBlock
from tl_devicefix.dispatch.mixing import OutsideBlocks
from tl_devicefix.monkeypatch.exchanged import exchanged_functions, functions_of, is_of_packages
from tl_devicefix.multihost.built_blocks import (
    OURS,
    Arguments,
    Built,
    Graph,
    Trial,
    changed,
    components,
    containers,
    description,
    entry_with,
    slots_in,
)
from tl_devicefix.multihost.commands import exchanged
from tl_devicefix.multihost.far_devices import FarDevices
from tl_devicefix.multihost.peers import Owner
from tl_devicefix.simulation.geometry import Geometry, geometry_of
from tl_devicefix.simulation.tensor import SimTensor, wrap

_log = logging.getLogger(__name__)
_warned_of: set[tuple[str, ...]] = set()


class _Snapshot:
    """Settings and tensors of a block, by which a change of them is noticed.

    All else that may change in a block is noticed by who has this snapshot: modules and their
    classes, hooks, and attributes that come or go.

    Attributes:
        description: of what a rank builds the block; None if it cannot.
        functions: those that the block may use, beside the ones that all blocks may.
        names: of its tensors, in order.
        dtypes: theirs.
    """

    def __init__(self, block: nn.Module) -> None:
        modules = components(block)
        configs = [vars(module).get(name) for module in modules for name in ("cfg", "config")]
        owners = {id(owner): owner for owner in (*modules, *configs) if owner is not None}
        namespaces = map(vars, owners.values())
        self._seen = [(space, tuple(space), tuple(space.values())) for space in namespaces]
        self._containers = containers(block)
        slots = slots_in(self._containers)
        self.names = [name for _, name in slots]
        self._layout = _layout(slots)
        self.dtypes = frozenset(dtype for *_, dtype in self._layout)
        self.description, classes = description(block)
        self.functions = functions_of(classes)

    def holds(self) -> bool:
        """Whether all settings are still the same objects."""
        return all(
            tuple(space) == names and all(map(is_, space.values(), values))
            for space, names, values in self._seen
        )

    def tensors(self) -> list[Any] | None:
        """The block's; None if they have other names, shapes or dtypes now."""
        slots = slots_in(self._containers)
        is_as_before = _layout(slots) == self._layout
        return [items[name] for items, name in slots] if is_as_before else None


def _layout(slots: Sequence[tuple[dict[str, Any], str]]) -> list[tuple[str, Any, torch.dtype]]:
    return [(name, items[name].shape, items[name].dtype) for items, name in slots]


def _is_looked_into() -> bool:
    """Whether there is something around that sees, or changes, each operation."""
    modes = map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack()))
    return (
        _len_torch_dispatch_stack() > 0
        or not all(isinstance(mode, OutsideBlocks) for mode in modes)
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._is_any_autocast_enabled()
    )


def _are_exchanged(functions: Any) -> bool:
    """Whether a block would use functions that its rank lacks; warns once if so."""
    names = exchanged_functions(functions)
    if names and names not in _warned_of:
        _warned_of.add(names)
        more = f" (and {len(names) - 1} more)" if names[1:] else ""
        _log.warning(
            f"{names[0]}{more} was replaced on this rank, but not on the others: until you put it "
            "back, blocks run operation by operation, which takes longer"
        )
    return bool(names)


def run_by_command(
    far: FarDevices, block: Any, inputs: dict[str, Any], cache: CacheOfBlock | None, look: Any
) -> torch.Tensor | None:
    """Run a block by one command; None if it has to be run operation by operation.

    Args:
        far: the devices.
        block: one in which nobody listens.
        inputs: its arguments, but for the cache; the first is the residual stream.
        cache: its part of a KV cache, if there is one.
        look: who keeps the snapshot, which is None as soon as there is something else in the block.
    """
    residual = next(iter(inputs.values()))
    snapshot: _Snapshot | None = look.snapshot
    own = snapshot.tensors() if snapshot is not None and snapshot.holds() else None
    if snapshot is None or own is None:  # as it has another dtype now, say
        snapshot = look.snapshot = _Snapshot(block)
        own = snapshot.tensors()
    # If the stream lies otherwise, so would the output.
    if snapshot.description is None or own is None or not residual.is_contiguous():
        return None
    attributes = {} if cache is None else _attributes(cache.entry)
    leaves = list(_leaves(inputs))
    names, classes = ((), ()) if cache is None else (cache.names, cache.classes)
    kept = [attributes[name] for name in names]
    if (
        not _are_on(residual.device, _tensors([own, leaves, kept]))
        or not all(map(_is_plain, (*leaves, *attributes.values())))
        or not all(map(is_of_packages, classes))
        or _is_looked_into()
        or _are_exchanged(snapshot.functions | functions_of(classes))
    ):
        return None
    call = _Call(far, residual, snapshot, [own, inputs, attributes], cache)
    far.wait_for_room(call.rank)
    n_batch = residual.shape[:1]  # an input may be one for all of them
    kinds: tuple[Any, ...] = (
        snapshot.dtypes,
        *classes,
        *inputs,
        *(
            (leaf.dtype, leaf.shape[:1] == n_batch) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in leaves
        ),
    )
    shapes = *kinds, *(leaf.shape for leaf in leaves if isinstance(leaf, torch.Tensor))
    if not {kinds, shapes} & call.trials.keys():
        trial, has_raised = call.try_out()
        call.trials[shapes if has_raised else kinds] = trial
    trial = call.trials.get(kinds)
    if trial is None:
        return None
    named = call.tensors() if torch.is_grad_enabled() else []
    which = tuple(number for number, tensor in enumerate(named) if tensor.requires_grad)
    if which:
        if (
            torch.is_anomaly_enabled()
            or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        ):
            return None
        made = _Whole.apply(call, trial, which, *(named[number] for number in which))
    else:
        made = call.run(trial)
    output, *cached = made
    call.store(trial, cached)
    return output  # type: ignore[no-any-return]


def _attributes(entry: Any) -> dict[str, Any]:
    """Those of a part of a KV cache, but for its device, which is another one there."""
    return {
        name: value
        for name, value in vars(entry).items()
        if not isinstance(value, torch.device) and not name.startswith(OURS)
    }


def _leaves(value: Any) -> Iterator[Any]:
    """What is in lists, tuples and dicts, as `exchanged` goes through them."""
    if type(value) in (list, tuple, dict):
        for item in value.values() if type(value) is dict else value:
            yield from _leaves(item)
    else:
        yield value


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in _leaves(values) if isinstance(leaf, torch.Tensor)]


def _is_plain(leaf: Any) -> bool:
    is_one = leaf is None or isinstance(leaf, bool | int | float | str | torch.dtype)
    return isinstance(leaf, torch.Tensor) or (
        is_one and type(leaf).__module__ in ("builtins", "numpy", "torch")
    )


def _are_on(device: torch.device, tensors: Sequence[Any]) -> bool:
    return all(type(tensor) is SimTensor and tensor.device == device for tensor in tensors)


def _contiguous(shape: Any, dtype: torch.dtype) -> Geometry:
    return geometry_of(torch.empty(tuple(shape), dtype=dtype, device="meta"))


class _Call:
    """A call of a block by one command, with or without a graph.

    Attributes:
        rank: the block's.
        trials: what running it has shown, by the kinds of its arguments.
    """

    def __init__(
        self,
        far: FarDevices,
        residual: Any,
        snapshot: _Snapshot,
        arguments: Arguments,
        cache: CacheOfBlock | None,
    ) -> None:
        self.far, self._residual, self._names = far, residual, snapshot.names
        self._arguments, self._cache = arguments, cache
        self._device = residual.device
        # Apart from the call, which holds the cache, and this a graph that has it.
        self.wrap = functools.partial(_wrapped, residual._allocation.machine, self._device)
        self._place = far.places[self._device.index]
        self.rank = self._place.rank
        assert snapshot.description is not None
        key = self._device.index, snapshot.description
        if key not in far.built:
            far.built[key] = self._build(key[1]), {}
        self._block, self.trials = far.built[key]
        self._after: tuple[Any, list[str]] | None = None

    def _build(self, description: bytes) -> Built | Owner:
        if not self.rank:
            return Built(description, self._place.device)
        owner = self.far.owner(self.rank)
        self.far.tell(self.rank, "build", owner.number, description, self._place.number)
        return owner

    def tensors(self) -> list[torch.Tensor]:
        """All of the arguments, in order."""
        return _tensors(self._arguments)

    def saved(self) -> list[Any]:
        """Tensors that a backward reads, also frozen weights; but biases may be changed before."""
        own, *others = self._arguments
        weights = [tensor for tensor, name in zip(own, self._names) if not _is_bias(name)]
        return weights + [tensor for tensor in _tensors(others) if type(tensor) is SimTensor]

    def _behind(self) -> tuple[Arguments, CacheOfBlock | None]:
        """The arguments as they are behind those of the machine."""
        arguments = exchanged(
            self._arguments, lambda item: item._cpu if type(item) is SimTensor else item
        )
        cache = self._cache and self._cache._replace(entry=None)
        return arguments, cache

    def _command(self, block: Owner) -> tuple[int, Arguments, CacheOfBlock | None]:
        """The block and its arguments, as a command names them."""
        arguments, cache = self._behind()
        return block.number, self.far.named(arguments), cache

    def try_out(self) -> tuple[Trial | None, bool]:
        """Run it on trial; if that gives nothing, also whether others may fare better."""
        if isinstance(self._block, Built):
            with torch.no_grad():
                trial, has_raised = self._block.try_out(*self._behind())
        else:
            command = "try_out", *self._command(self._block)
            trial, has_raised = self.far.answer(self.rank, command, lambda: (None, True))
        if trial is None:
            return None, has_raised
        like = _contiguous(self._residual.shape, self._residual.dtype)
        sizes = {(shape[0], shape[self._cache.length_dim]) for shape, _ in trial.new if self._cache}
        fits = trial.output == like and sizes <= {tuple(self._residual.shape[:2])}
        return (trial, False) if fits else (None, True)

    def run(self, trial: Trial) -> list[SimTensor]:
        """Run it without a graph; return its output, and its cache's new keys and values."""
        if isinstance(self._block, Built):
            with torch.no_grad():
                return self.wrap(self._block.run(*self._behind()))
        made = self._promises(trial)
        storages = self.far.storages_of(made)
        self.far.tell(self.rank, "call", *self._command(self._block), storages)
        return self.wrap(made)

    def record(
        self, trial: Trial, which: tuple[int, ...], leaves: Any
    ) -> tuple[list[SimTensor], Graph | _FarGraph]:
        """Run it; return what `run` does, and the graph for gradients of some tensors."""
        if isinstance(self._block, Built):
            graph = Graph(self._block, *self._behind(), which)
            return self.wrap(graph.outputs), graph
        made = self._promises(trial)
        far_graph = _FarGraph(self.far, self.rank, which, leaves)
        others = far_graph.number, which, self.far.storages_of(made)
        self.far.tell(self.rank, "record", *self._command(self._block), *others)
        return self.wrap(made), far_graph

    def _promises(self, trial: Trial) -> list[torch.Tensor]:
        """What the rank is about to make."""
        geometries = [_contiguous(self._residual.shape, self._residual.dtype)]
        if self._cache is not None:
            grown, names = self._grown(self._cache, trial)
            geometries += [geometry_of(getattr(grown, name)) for name in names]
        return [self.far.promise(geometry, self.rank) for geometry in geometries]

    def _grown(self, cache: CacheOfBlock, trial: Trial) -> tuple[Any, list[str]]:
        """The cache after the run, without values, and the names of what is new in it."""
        if self._after is None:
            attributes = exchanged(self._arguments[2], _blank)
            grown = entry_with(cache.classes[0], attributes)
            n_batch, n_new = self._residual.shape[:2]
            new = []
            for shape, dtype in trial.new:
                sizes = [n_batch, *shape[1:]]
                sizes[cache.length_dim] = n_new
                new.append(torch.empty(sizes, dtype=dtype, device="meta"))
            getattr(grown, cache.grow)(*new)
            self._after = grown, [name for name, _ in changed(grown, cache, attributes)]
        return self._after

    def store(self, trial: Trial, cached: Sequence[torch.Tensor]) -> None:
        """Have the cache as it is after the run."""
        if self._cache is None:
            return
        grown, names = self._grown(self._cache, trial)
        after = {
            name: self._device if isinstance(value, torch.device) else value
            for name, value in vars(grown).items()
            if not isinstance(value, torch.Tensor)
        }
        vars(self._cache.entry).update(after, **dict(zip(names, cached, strict=True)))


def _wrapped(machine: Any, device: torch.device, made: Sequence[Any]) -> list[SimTensor]:
    return [wrap(tensor, machine, device) for tensor in made]


def _blank(tensor: Any) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _is_bias(name: str) -> bool:
    return name == "b" or name.lstrip("_").startswith("b_") or "bias" in name


class _FarGraph:
    """A `Graph` that another rank holds, until this is let go."""

    def __init__(
        self, far: FarDevices, rank: int, which: Sequence[int], leaves: Sequence[SimTensor]
    ) -> None:
        self._far, self._rank = far, rank
        self._owner: Owner | None = far.owner(rank)
        self.number = self._owner.number
        # As parameters lie: autograd copies a gradient that lies otherwise.
        self._like = {
            number: geometry_of(torch.empty_like(leaf._cpu)) for number, leaf in zip(which, leaves)
        }

    def backward(
        self, gradients: Sequence[torch.Tensor | None], which: tuple[int, ...], keeps: bool
    ) -> list[torch.Tensor]:
        """Tell the rank to make gradients of some of the leaves."""
        made = [self._far.promise(self._like[number], self._rank) for number in which]
        arguments = self.number, self._far.named(gradients), which, keeps
        self._far.tell(self._rank, "backward", *arguments, self._far.storages_of(made))
        if not keeps:
            self._owner = None
        return made


class _Whole(torch.autograd.Function):
    """A block's forward and backward, each one command."""

    @staticmethod
    def forward(ctx: Any, call: _Call, trial: Trial, which: tuple[int, ...], *leaves: Any) -> Any:  # type: ignore[override]
        outputs, ctx.graph = call.record(trial, which, leaves)
        ctx.save_for_backward(*call.saved())
        ctx.wrap, ctx.which = call.wrap, which
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:  # type: ignore[override]
        assert ctx.saved_tensors  # which raises if something was changed, or there was one before
        if torch.is_grad_enabled():
            raise RuntimeError(
                "gradients of gradients do not pass through blocks that another rank runs by one "
                "command: call init_hosts(whole_blocks=False)"
            )
        needed = ctx.needs_input_grad[3:]
        which = tuple(number for number, need in zip(ctx.which, needed) if need)
        keeps = torch._C._autograd._get_current_graph_task_keep_graph()
        behind = [None if gradient is None else gradient._cpu for gradient in gradients]
        made = iter(ctx.wrap(ctx.graph.backward(behind, which, keeps)))
        return None, None, None, *(next(made) if need else None for need in needed)

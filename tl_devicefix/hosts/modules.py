"""Blocks that a rank runs whole: one command, where each of their operations would be one.

The rank holds a copy of the block, whose weights are the very storages that the block has there.
"""

from __future__ import annotations

import io
import pickle
import sys
import threading
from types import FunctionType
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import nn
from torch.nn.modules import module as torch_modules
from torch.utils._python_dispatch import _len_torch_dispatch_stack
from transformer_lens.hook_points import HookPoint

from tl_devicefix.hosts.caching import Layout, layout_of, noting
from tl_devicefix.hosts.commands import HeldTensor, Stored
from tl_devicefix.hosts.far_devices import FarDevices
from tl_devicefix.hosts.graphs import Graph, Key
from tl_devicefix.hosts.snapshots import HOOKS, Snapshot, has_forward_within, tensors_of
from tl_devicefix.simulation.geometry import geometry_of
from tl_devicefix.simulation.machine import DEVICE_TYPE, Machine
from tl_devicefix.simulation.tensor import SimTensor, wrap

_GLOBAL_HOOKS = tuple(getattr(torch_modules, f"_global{name}") for name in HOOKS)


class OutsideBlocks:
    """Of a mode for torch functions: it changes nothing that is computed within a block.

    Whatever else it does there, it need not: blocks run whole within it.
    """


class HeldCopy:
    """A copy of a block, which its rank has: one for all blocks that are the same, as of views.

    Args:
        machine: to which the devices of all ranks belong.
        device: where the block is.
        told: the block, as bytes.
        kept: its tensors, if they are rank 0's.

    Attributes:
        far: the devices of all ranks.
    """

    def __init__(
        self, machine: Machine, device: torch.device, told: bytes, kept: list[torch.Tensor]
    ) -> None:
        self.far = cast(FarDevices, machine.asynchronous)
        self._copies: dict[tuple[int, ...], Any] = {}
        self._machine, self._device = machine, device
        self._told, self._kept = told, kept
        self._used: dict[Any, dict[Key, bool] | None] = {}
        self._layouts: dict[Any, Layout | None] = {}
        if self.rank:
            self._owner = self.far.owner(self.rank)
            self.far.hold(device.index, self._owner.number, told)

    def copy(self, points: tuple[int, ...] = ()) -> Any:
        """The copy of which these hook points are noted, if it is rank 0's.

        Another one for others: what listens in one thread must not be there for another's.
        """
        if points not in self._copies:
            here = self.far.places[self._device.index].device
            made = Unpickler(self._told, self._kept.__getitem__, here).load()
            self._copies.setdefault(points, made)
        return self._copies[points]

    @property
    def number(self) -> int:
        """By which another rank has it."""
        return self._owner.number

    @property
    def rank(self) -> int:
        """Whose device it is on."""
        return self.far.places[self._device.index].rank

    def wrapped(self, made: torch.Tensor) -> SimTensor:
        """What was computed there, on its device."""
        return wrap(made, self._machine, self._device)

    def used(self, given: dict[str, Any]) -> dict[Key, bool] | None:
        """Which tensors a backward gives gradients, and whether it reads them for others.

        None if that depends on values.

        A block without values tells, which is run here once.
        """
        named = tuple(name for name, each in given.items() if each is not None)
        if named not in self._used:
            self._used[named] = self._find_used(given)
        return self._used[named]

    def _find_used(self, given: dict[str, Any]) -> dict[Key, bool] | None:
        blank = {
            name: torch.empty_like(each._cpu, device="meta") if type(each) is SimTensor else each
            for name, each in given.items()
        }
        block = Unpickler(self._told, self._blank, torch.device("meta")).load()
        keys: list[Key] = [n for n, each in blank.items() if _is_differentiable(each)]
        keys += [i for i, each in enumerate(tensors_of(block)) if _is_differentiable(each)]
        read: set[int] = set()

        def noted(tensor: torch.Tensor) -> torch.Tensor:
            read.add(tensor.untyped_storage()._cdata)
            return tensor

        try:
            with torch.autograd.graph.saved_tensors_hooks(noted, lambda each: each):
                graph = Graph(block, blank, keys)
            gradients = graph.backward(torch.empty_like(graph.output), range(len(keys)))
        except RuntimeError:  # it asks for values, or torch has no rule for it
            return None
        return {
            key: each.untyped_storage()._cdata in read
            for key, each, gradient in zip(keys, graph.inputs, gradients)
            if gradient is not None
        }

    def layout(self, given: dict[str, Any], points: tuple[int, ...]) -> Layout | None:
        """How what it gives, and what hook points are called with, will lie; None if unknown.

        A block without values tells, which is run here once for each geometry.
        """
        blank = {
            name: _blank_like(each._cpu) if type(each) is SimTensor else each
            for name, each in given.items()
        }
        of = tuple(geometry_of(e) if isinstance(e, torch.Tensor) else e for e in blank.values())
        key = points, tuple(blank), of
        if key not in self._layouts:
            block = Unpickler(self._told, self._blank, torch.device("meta")).load()
            known: dict[Key, torch.Tensor] = dict(enumerate(tensors_of(block)))
            known |= {n: each for n, each in blank.items() if isinstance(each, torch.Tensor)}
            try:
                with torch.no_grad(), noting(block, points) as called:
                    self._layouts[key] = layout_of(block(**blank), called, known)
            except RuntimeError:  # it asks for values, or torch has no rule for it
                self._layouts[key] = None
        return self._layouts[key]

    def _blank(self, there: Stored | int) -> torch.Tensor:
        if isinstance(there, int):
            return torch.empty_like(self._kept[there], device="meta")
        return torch.empty_strided(there.shape, there.stride, dtype=there.dtype, device="meta")


def _blank_like(tensor: torch.Tensor) -> torch.Tensor:
    shape, stride, dtype = geometry_of(tensor)
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


class HeldBlock(NamedTuple):
    """A block, as its rank has a copy of it.

    Attributes:
        there: the copy.
        device: where both are.
        seen: what was set in the block when it was copied.
        points: to which of its hook points caching hooks listen now.
    """

    there: HeldCopy
    device: torch.device
    seen: Snapshot
    points: tuple[int, ...] = ()


_held: WeakKeyDictionary[nn.Module, HeldBlock] = WeakKeyDictionary()
_copies: WeakValueDictionary[Any, HeldCopy] = WeakValueDictionary()
_holding = threading.Lock()


def held(block: nn.Module, residual: Any) -> HeldBlock | None:
    """A block's copy where the block is; None if it must be run here, operation by operation.

    Args:
        block: whose copy is made now, unless there is one that is still right.
        residual: what it is given.
    """
    if type(residual) is not SimTensor or _is_looked_into():
        return None
    machine = residual._allocation.machine
    if not isinstance(machine.asynchronous, FarDevices):
        return None
    found = _still_held(block, machine)
    if found is None:
        with _holding:  # runs in flight are threads, of which one is enough to copy it
            found = _still_held(block, machine) or _hold(block, machine, residual.device)
    if found is None or found.device != residual.device:
        return None
    points = found.seen.listened()
    return None if points is None else found._replace(points=points) if points else found


def _still_held(block: nn.Module, machine: Machine) -> HeldBlock | None:
    found = _held.get(block)
    is_held = found is not None and found.there.far is machine.asynchronous and found.seen.holds()
    return found if is_held else None


def _is_looked_into() -> bool:
    """Whether there is something around that sees, or changes, each operation."""
    return (
        any(_GLOBAL_HOOKS)
        or _len_torch_dispatch_stack() > 0
        or not all(isinstance(each, OutsideBlocks) for each in _function_modes())
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or torch.is_autocast_enabled(DEVICE_TYPE)
    )


def _function_modes() -> list[Any]:
    there = range(torch._C._len_torch_function_stack())
    return [torch._C._get_function_stack_at(each) for each in there]


def _hold(block: nn.Module, machine: Machine, device: torch.device) -> HeldBlock | None:
    seen = Snapshot(block)
    if has_forward_within(block) or seen.listened() is None:
        return None
    tensors = tensors_of(block)
    if not all(type(each) is SimTensor and each.device == device for each in tensors):
        return None
    far: Any = machine.asynchronous
    try:
        told, kept = _pickled(block, far)
    except (pickle.PicklingError, AttributeError, TypeError):  # a class of the user's, a lambda
        return None
    key = far, device, told, tuple(map(id, kept))
    there = _copies.get(key)
    if there is None:
        there = _copies[key] = HeldCopy(machine, device, told, kept)
    found = _held[block] = HeldBlock(there, device, seen)
    return found


_EVERYWHERE = {
    *sys.stdlib_module_names,
    *("transformer_lens", "torch", "transformers", "tl_devicefix", "numpy", "einops"),
} - {"__main__"}
"""Packages that all ranks have; classes of others, as of a notebook, may be rank 0's alone."""


class _Pickler(pickle.Pickler):
    """Tells tensors that the rank has by where they are, and its devices by what they are there."""

    def __init__(self, file: io.BytesIO, far: FarDevices) -> None:
        super().__init__(file, protocol=5)
        self._far = far
        self.kept: list[torch.Tensor] = []

    def reducer_override(self, value: Any) -> Any:
        is_named = isinstance(value, type | FunctionType)
        if is_named and value.__module__.partition(".")[0] not in _EVERYWHERE:
            raise pickle.PicklingError(f"{value.__module__} may not be there")
        if type(value) is HookPoint:
            return _without_hooks(value)
        return NotImplemented

    def persistent_id(self, value: Any) -> Any:
        if type(value) is SimTensor:
            is_parameter = getattr(value, "_is_param", False)
            if self._far.places[value.device.index].rank:
                return HeldTensor(self._far.stored(value._cpu), is_parameter)
            self.kept.append(value._cpu)
            return HeldTensor(len(self.kept) - 1, is_parameter)
        if isinstance(value, torch.device) and value.type == DEVICE_TYPE:
            return "device"
        return None


def _without_hooks(point: HookPoint) -> Any:
    """How to pickle a hook point: without what listens to it."""
    reduced: Any = point.__reduce_ex__(5)
    made, args, state, *rest = reduced
    state = {**state, **{name: type(state[name])() for name in (*HOOKS, *_SAID_BY_POINT)}}
    return made, args, state, *rest


_SAID_BY_POINT = ("fwd_hooks", "bwd_hooks", "ctx")


def _pickled(block: nn.Module, far: FarDevices) -> tuple[bytes, list[torch.Tensor]]:
    """A copy of a block without the hooks of its own, with which it is carried to."""
    alone = block.__new__(type(block))
    alone.__dict__.update(vars(block))
    for name in HOOKS:
        alone.__dict__[name] = type(vars(block)[name])()
    file = io.BytesIO()
    pickler = _Pickler(file, far)
    pickler.dump(alone)
    return file.getvalue(), pickler.kept


class Unpickler(pickle.Unpickler):
    """Makes a block of the tensors that are there.

    Args:
        told: the block, as rank 0 told it.
        found: gives a tensor.
        device: what stands for the block's.
    """

    def __init__(self, told: bytes, found: Any, device: torch.device) -> None:
        super().__init__(io.BytesIO(told))
        self._found, self._device = found, device

    def persistent_load(self, pid: Any) -> Any:
        """What stands for a tensor, or for a device of rank 0's."""
        if pid == "device":
            return self._device
        tensor = self._found(pid.stored)
        return nn.Parameter(tensor, requires_grad=False) if pid.is_parameter else tensor

"""Modules that another rank runs whole: one command, where each of their operations would be one.

The rank holds a copy of the module, whose weights are the very storages that the module has there.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import pickle
import weakref
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules import module as torch_modules
from torch.utils._python_dispatch import _len_torch_dispatch_stack

from tl_devicefix.hosts.commands import HeldTensor
from tl_devicefix.hosts.far_devices import FarDevices
from tl_devicefix.simulation.geometry import Geometry
from tl_devicefix.simulation.machine import DEVICE_TYPE
from tl_devicefix.simulation.tensor import SimTensor, wrap

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = tuple(getattr(torch_modules, f"_global{name}") for name in _HOOKS)
_numbers = itertools.count()


@dataclasses.dataclass
class _Held:
    """A module, as a rank has a copy of it.

    Attributes:
        number: of the copy.
        state: what was set in its modules.
        tensors: its parameters and buffers.
        settings: of its config, as they were.
        copy: the copy, if that is rank 0's.
        let_go: has a rank let its copy go.
    """

    number: int
    state: list[dict[str, Any]]
    tensors: list[torch.Tensor]
    storages: list[Any]
    settings: dict[str, Any]
    copy: Any = None
    let_go: Callable[[], object] = lambda: None

    def is_as_it_was(self, module: nn.Module) -> bool:
        """Whether nobody has exchanged a module or a tensor, or set something in one."""
        there, state = _tensors(module), _state(module)
        return (
            len(state) == len(self.state)
            and all(_is_same(a, b) for a, b in zip(state, self.state))
            and len(there) == len(self.tensors)
            and all(a is b for a, b in zip(there, self.tensors))
            and all(a._allocation is b for a, b in zip(there, self.storages))  # type: ignore[attr-defined]
            and vars(module.cfg) == self.settings
        )


_held: WeakKeyDictionary[nn.Module, _Held] = WeakKeyDictionary()


def runs_elsewhere(module: nn.Module, residual: Any) -> bool:
    """Whether a module may be run by the rank that has its weights: nobody looks into it.

    Args:
        module: a block.
        residual: what it is given, on its device.
    """
    if type(residual) is not SimTensor or torch.is_grad_enabled():
        return False
    if not isinstance(residual._allocation.machine.asynchronous, FarDevices):
        return False
    if any(_GLOBAL_HOOKS) or _len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    return not any(_is_watched(each) for each in module.modules() if each is not module)


def _is_watched(module: nn.Module) -> bool:
    held = vars(module)
    return "forward" in held or any(held[name] for name in _HOOKS)


def run_elsewhere(
    module: nn.Module,
    residual: SimTensor,
    given: dict[str, Any],
    entry: Any = None,
) -> torch.Tensor | None:
    """What a block makes of the residual stream; None if the rank cannot run it.

    Args:
        module: the block, all of whose weights are on one device.
        residual: [batch, pos, d_model], on that device.
        given: what else it is given, by name.
        entry: of a KV cache, to which it appends.
    """
    device = residual.device
    allocation = residual._allocation
    far: Any = allocation.machine.asynchronous
    held = _hold(module, far, device)
    if held is None or any(
        isinstance(each, torch.Tensor) and each.device != device for each in given.values()
    ):
        return None
    cpu = {n: each._cpu if type(each) is SimTensor else each for n, each in given.items()}
    rank = far.places[device.index].rank
    there = None
    if entry is not None:
        there = type(entry), entry.past_keys._cpu, entry.past_values._cpu, entry.frozen
    if rank:
        gives = _told(far, rank, held, residual, cpu, there)
    else:
        with torch.no_grad():
            gives = called(held.copy, residual._cpu, cpu, there)
    made = [wrap(each, allocation.machine, device) for each in gives]
    if len(made) > 1:
        entry.past_keys, entry.past_values = made[1:]
    return made[0]


def _told(
    far: FarDevices,
    rank: int,
    held: _Held,
    residual: SimTensor,
    given: dict[str, Any],
    entry: tuple[Any, ...] | None,
) -> list[torch.Tensor]:
    """Tell a rank to run a module; returns what it will have given."""
    output = far.promise(_contiguous(residual.shape, residual.dtype), rank)
    gives = [output]
    if entry is not None:
        _, *past, is_frozen = entry
        for each in () if is_frozen else past:
            batch, length, *heads = each.shape
            shape = (batch, length + residual.shape[1], *heads)
            gives.append(far.promise(_contiguous(shape, each.dtype), rank))
    far.call(rank, held.number, residual._cpu, given, entry, gives)
    return gives


def _hold(module: nn.Module, far: FarDevices, device: torch.device) -> _Held | None:
    """The copy that a rank has, made now unless there is one that is still right."""
    before = _held.get(module)
    if before is not None and before.is_as_it_was(module):
        return before
    tensors = _tensors(module)
    if not all(type(each) is SimTensor and each.device == device for each in tensors):
        return None
    try:
        told, kept = _pickled(module, far)
    except (pickle.PicklingError, AttributeError, TypeError):  # a lambda, and the like
        return None
    held = _Held(
        next(_numbers),
        _state(module),
        tensors,
        [each._allocation for each in tensors],  # type: ignore[attr-defined]
        dict(vars(module.cfg)),  # type: ignore[arg-type]
    )
    if before is not None:
        before.let_go()
    if far.places[device.index].rank:
        far.hold(device.index, held.number, told)
        held.let_go = weakref.finalize(
            module, far.let_go, far.places[device.index].rank, held.number
        )
    else:
        held.copy = Unpickler(told, kept.__getitem__, far.places[device.index].device).load()
    _held[module] = held
    return held


def _state(module: nn.Module) -> list[dict[str, Any]]:
    """What is set in each of its modules, and which these are, but not what hooks there are."""
    return [
        {
            # Not the module itself, which would be held by what is known of it.
            "": None if each is module else each,
            **{name: value for name, value in vars(each).items() if _is_setting(name)},
        }
        for each in module.modules()
    ]


def _is_setting(name: str) -> bool:
    return name[0] != "_" or name.startswith("_tl_devicefix")


def _is_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(one[name] is other[name] for name in one)


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [
        each
        for one in module.modules()
        for each in (*one._parameters.values(), *one._buffers.values())
        if each is not None
    ]


def _contiguous(shape: Any, dtype: torch.dtype) -> Geometry:
    return Geometry(torch.Size(shape), torch.empty(shape, device="meta").stride(), dtype)


class _Pickler(pickle.Pickler):
    """Tells tensors that the rank has by where they are, and its devices by what they are there."""

    def __init__(self, file: io.BytesIO, far: FarDevices) -> None:
        super().__init__(file, protocol=5)
        self._far = far
        self.kept: list[torch.Tensor] = []

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


def _pickled(module: nn.Module, far: FarDevices) -> tuple[bytes, list[torch.Tensor]]:
    """A copy of a module without the hooks of its own, with which it is carried to."""
    alone = module.__new__(type(module))
    alone.__dict__.update(vars(module))
    for name in _HOOKS:
        alone.__dict__[name] = type(vars(module)[name])()
    file = io.BytesIO()
    pickler = _Pickler(file, far)
    pickler.dump(alone)
    return file.getvalue(), pickler.kept


def called(
    module: nn.Module,
    residual: torch.Tensor,
    options: dict[str, Any],
    entry: tuple[type, torch.Tensor, torch.Tensor, bool] | None,
) -> list[torch.Tensor]:
    """Run a copy of a block; returns what it gives, and what a KV cache has got.

    Args:
        module: the copy.
        residual: [batch, pos, d_model].
        options: what else it is given.
        entry: class, keys, values of a KV cache's entry, and whether it is frozen.
    """
    if entry is None:
        return [module(residual, **options)]
    cls, keys, values, is_frozen = entry
    there = cls(past_keys=keys, past_values=values, frozen=is_frozen)
    output = module(residual, past_kv_cache_entry=there, **options)
    return [output] if is_frozen else [output, there.past_keys, there.past_values]


class Unpickler(pickle.Unpickler):
    """Makes a module of the tensors that are there.

    Args:
        told: the module, as rank 0 told it.
        found: gives a tensor.
        device: what stands for the module's.
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

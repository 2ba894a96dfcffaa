"""A block as bytes, of which a rank makes its copy; its tensors are told by where they are."""

from __future__ import annotations

import inspect
import io
import pickle
import weakref
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from transformer_lens.hook_points import HookPoint

from tl_devicefix.multihost.classes import is_everywhere, is_function_everywhere
from tl_devicefix.multihost.commands import HeldTensor
from tl_devicefix.multihost.far_devices import FarDevices
from tl_devicefix.multihost.snapshots import HOOKS, tensors_of
from tl_devicefix.simulation.machine import DEVICE_TYPE
from tl_devicefix.simulation.tensor import SimTensor


def pickled(block: nn.Module, far: FarDevices) -> tuple[bytes, list[torch.Tensor]] | None:
    """A copy of a block without the hooks of its own, and its tensors if they are rank 0's.

    None if the rank could not make the same of it.
    """
    alone = block.__new__(type(block))
    alone.__dict__.update(vars(block))
    for name in HOOKS:
        alone.__dict__[name] = type(vars(block)[name])()
    file = io.BytesIO()
    pickler = _Pickler(file, far, alone)
    try:
        pickler.dump(alone)
    except Exception:  # noqa: BLE001  # of whatever is set in it, which then is used here
        return None
    return file.getvalue(), pickler.kept


class _Pickler(pickle.Pickler):
    """Tells tensors that the rank has by where they are, and its devices by what they are there.

    It refuses what is not the block's, or would be another thing there.
    """

    def __init__(self, file: io.BytesIO, far: FarDevices, block: nn.Module) -> None:
        super().__init__(file, protocol=5)
        self._far = far
        self._modules = set(map(id, block.modules()))
        self._tensors = set(map(id, tensors_of(block)))
        self.kept: list[torch.Tensor] = []

    def reducer_override(self, value: Any) -> Any:
        if getattr(type(value), "found_anew", False):  # what is known of a block
            return NotImplemented
        if not self._is_same_there(value):
            raise pickle.PicklingError(f"{type(value).__name__} may be another there")
        return _without_hooks(value) if type(value) is HookPoint else NotImplemented

    def _is_same_there(self, value: Any) -> bool:
        kind = type(value)
        if isinstance(value, type):
            return is_everywhere(value.__module__)
        if kind is FunctionType:
            return is_function_everywhere(value)
        if kind is MethodType:  # is told by its name
            there = inspect.getattr_static(type(value.__self__), value.__name__, None)
            return there is value.__func__
        if isinstance(value, nn.Module) and id(value) not in self._modules:
            return False
        is_stateful = hasattr(kind, "__next__") or kind in weakref.ProxyTypes
        return is_everywhere(kind.__module__) and not is_stateful

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if type(value) is not SimTensor or id(value) not in self._tensors:
                raise pickle.PicklingError("a tensor that is none of the block's")
            return HeldTensor(self._where(value._cpu, value.device), _is_parameter(value))
        if isinstance(value, torch.device) and value.type == DEVICE_TYPE:
            return "device"
        return None

    def _where(self, tensor: torch.Tensor, device: torch.device) -> Any:
        if self._far.places[device.index].rank:
            return self._far.stored(tensor)
        self.kept.append(tensor)
        return len(self.kept) - 1


def _without_hooks(point: HookPoint) -> Any:
    """How to pickle a hook point: without what listens to it."""
    reduced: Any = point.__reduce_ex__(5)
    made, args, state, *rest = reduced
    state = {**state, **{name: type(state[name])() for name in (*HOOKS, *_SAID_BY_POINT)}}
    return made, args, state, *rest


_SAID_BY_POINT = ("fwd_hooks", "bwd_hooks", "ctx")


def _is_parameter(tensor: torch.Tensor) -> bool:
    return getattr(tensor, "_is_param", False)


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

"""Entering and leaving a simulated machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from tl_devicefix.simulation import backend
from tl_devicefix.simulation.machine import Machine, bytes_of
from tl_devicefix.simulation.tensor import SimTensor, set_data


@contextmanager
def simulate(
    n_devices: int, memory: int | str | Sequence[int | str] = "80GiB"
) -> Iterator[Machine]:
    """Simulate a machine with ``n_devices`` devices, ``sim:0`` to ``sim:{n_devices - 1}``."""
    sizes = [memory] * n_devices if isinstance(memory, (int, str)) else list(memory)
    backend.register()
    machine = Machine([bytes_of(size) for size in sizes])
    with ExitStack() as stack:
        backend.set_active_machine(machine)
        stack.callback(_leave, machine)
        _move_parameters_in_place(stack)
        _avoid_inference_mode(stack)
        # Worker threads would be one per device that torch's guard knows of, which is one.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        yield machine


def _leave(machine: Machine) -> None:
    machine._is_open = False
    backend.set_active_machine(None)


def _move_parameters_in_place(stack: ExitStack) -> None:
    """Make ``nn.Module.to`` set ``param.data`` across device types, as it does from CPU to CUDA."""
    compatible = torch._has_compatible_shallow_copy_type

    def _has_compatible_shallow_copy_type(one: torch.Tensor, other: torch.Tensor) -> bool:
        return SimTensor in (type(one), type(other)) or compatible(one, other)

    torch._has_compatible_shallow_copy_type = _has_compatible_shallow_copy_type
    stack.callback(setattr, torch, "_has_compatible_shallow_copy_type", compatible)
    # Inherited from a C type before and after, so that it is deleted and not set back.
    torch.Tensor.data = property(torch._C.TensorBase.data.__get__, set_data)
    stack.callback(delattr, torch.Tensor, "data")


def _avoid_inference_mode(stack: ExitStack) -> None:
    """Run ``inference_mode`` as ``no_grad``: tensor subclasses do not work in it."""
    cls = torch.inference_mode
    enter = cls.__enter__

    def __enter__(self: Any) -> None:
        self._inference_mode_context = torch.no_grad() if self.mode else torch.enable_grad()
        self._inference_mode_context.__enter__()

    cls.__enter__ = __enter__  # type: ignore[method-assign]
    stack.callback(setattr, cls, "__enter__", enter)

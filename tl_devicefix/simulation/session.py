"""Enter and leave a simulated machine, and undo each change of torch."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import safetensors.torch
import torch
from packaging.version import Version

from tl_devicefix.errors import shown
from tl_devicefix.placement.devices import DEVICE_TYPE, DeviceLike
from tl_devicefix.placement.memory import parse_bytes
from tl_devicefix.simulation import backend, backward
from tl_devicefix.simulation.executor import CpuExecutor, MetaExecutor
from tl_devicefix.simulation.machine import Machine, active_machine, entered, entered_machine
from tl_devicefix.simulation.tensor import TENSOR_DATA, SimTensor, set_data

# torch's device guard and hooks for backends written in Python are private, and 2.9 had none. The
# tests pass with these two versions and with 2.13.
_OLDEST_TORCH, _NEWEST_TORCH = "2.10", "2.15"
MAX_DEVICES = 64


@contextmanager
def simulate(
    n_devices: int, memory: int | str | Sequence[int | str] = "80GiB", *, values: bool = True
) -> Iterator[Machine]:
    """Simulate a machine with devices ``sim:0`` to ``sim:{n_devices - 1}`` on the CPU.

    Simulated devices compute the CPU's numbers, random ones too. Operands on different devices
    raise torch's errors. ``torch.inference_mode`` runs as ``torch.no_grad``, backward runs on your
    thread, autocast casts as on the CPU, and a pickled tensor loads on the CPU.

    torch keeps the name of the device type until the process ends, so use real GPUs in another
    process. The simulation uses private parts of torch, and needs torch 2.10 to 2.15.

    Args:
        n_devices: how many devices, at least 1.
        memory: the memory of each device, in bytes or as accelerate writes it ("8GiB"), or a
            sequence of such sizes, one for each device.
        values: False for tensors that have a device, a shape and a size, but no values. Then
            nothing is computed, and models of any size fit. A number that you read is 0, a tensor
            that you copy to the CPU is zeros, and a mask selects everything. See
            `tl_devicefix.dry_run`.

    Yields:
        The machine, which counts transfers and memory. Call `simulate` again for another one.

    Raises:
        RuntimeError: if torch is another version, if the process has another backend of this
            kind, or inside another `simulate` or ``torch.inference_mode``.
        ValueError: if ``n_devices`` or ``memory`` is invalid.

    >>> with simulate(2) as machine:
    ...     x = torch.ones(3, device="sim:1")
    ...     y = (x * 2).to("sim:0")
    ...     machine.memory_allocated("sim:1")
    12
    >>> machine.transfers
    sim:1 -> sim:0  1  12 bytes
    all             1  12 bytes
    """
    kind = CpuExecutor if values else MetaExecutor
    capacities = _capacities(n_devices, memory)
    with entering(lambda: Machine(capacities, kind())) as machine:
        yield machine


@contextmanager
def entering(make: Callable[[], Machine]) -> Iterator[Machine]:
    """Make a machine, change torch for it, and undo that at the end."""
    _prepare_torch()
    machine = make()
    with ExitStack() as stack:
        stack.enter_context(entered(machine))
        _move_parameters_in_place(stack)
        _avoid_inference_mode(stack)
        _keep_errors_of_backwards(stack)
        _open_safetensors(stack)
        # If Python ends within the block, undo the changes while modules still exist.
        atexit.register(stack.close)
        stack.callback(atexit.unregister, stack.close)
        yield machine


def simulate_apart(
    n_devices: int, memory: int | str | Sequence[int | str] = "80GiB"
) -> AbstractContextManager[Machine]:
    """Return a context like `simulate(..., values=False)` that may be within another `simulate`."""
    if entered_machine() is None:
        return simulate(n_devices, memory, values=False)
    machine = Machine(_capacities(n_devices, memory), MetaExecutor())
    return entered(machine)  # torch is changed already


def check_number(n_devices: object) -> None:
    """Refuse a number of devices that is not an int or is out of range."""
    if type(n_devices) is not int or not 1 <= n_devices <= MAX_DEVICES:
        raise ValueError(
            f"n_devices must be an int from 1 to {MAX_DEVICES}, but is {shown(n_devices)}"
        )


def _capacities(n_devices: int, memory: int | str | Sequence[int | str]) -> list[int]:
    check_number(n_devices)
    sizes = [memory] * n_devices if isinstance(memory, (int, str)) else memory
    if not isinstance(sizes, (list, tuple)) or len(sizes) != n_devices:
        raise ValueError(
            f"memory must be a size such as '24GiB', or a list of one for each of {n_devices} "
            f"devices, but is {shown(memory)}"
        )
    return [parse_bytes(size) for size in sizes]


def _prepare_torch() -> None:
    """Register the device type; refuse an untested torch, inference mode and nesting."""
    version = ".".join(torch.__version__.split(".")[:2])  # "2.13.1+cpu" -> "2.13"
    if not Version(_OLDEST_TORCH) <= Version(version) <= Version(_NEWEST_TORCH):
        raise RuntimeError(
            f"simulate needs torch {_OLDEST_TORCH} to {_NEWEST_TORCH}, whose private parts it uses,"
            f" but this is torch {torch.__version__}: install one of those, or use real devices"
        )
    if torch.is_inference_mode_enabled():
        raise RuntimeError("simulate cannot be inside torch.inference_mode: enter it before")
    if (outer := entered_machine()) is not None:
        raise RuntimeError(
            f"simulate is entered already, with {len(outer.devices)} device(s): leave that"
            " `with` block before you enter another"
        )
    backend.register()


def _move_parameters_in_place(stack: ExitStack) -> None:
    """Make ``nn.Module.to`` set ``param.data`` across device types, as it does from CPU to CUDA."""
    # By default, `to` would make new parameters, which optimizers and tied modules do not know.
    compatible = torch._has_compatible_shallow_copy_type

    # Take any arguments: torch.compile compares named ones with its polyfill's when it is imported.
    def is_compatible(*tensors: torch.Tensor) -> bool:
        return any(type(tensor) is SimTensor for tensor in tensors) or compatible(*tensors)

    stack.enter_context(patch.object(torch, "_has_compatible_shallow_copy_type", is_compatible))
    stack.enter_context(patch.object(torch.Tensor, "data", property(TENSOR_DATA.__get__, set_data)))


def _avoid_inference_mode(stack: ExitStack) -> None:
    """Run ``inference_mode`` as ``no_grad``: tensor subclasses do not work in it."""

    def enter(self: Any) -> None:
        # torch's own `__exit__` exits the context in this attribute.
        self._inference_mode_context = torch.no_grad() if self.mode else torch.enable_grad()
        self._inference_mode_context.__enter__()

    stack.enter_context(patch.object(torch.inference_mode, "__enter__", enter))


def _keep_errors_of_backwards(stack: ExitStack) -> None:
    """Make a failing backward pass raise, where torch would end the process."""
    engine = backward.run_backward(torch.autograd.graph._engine_run_backward)
    for module in (torch.autograd, torch.autograd.graph):  # torch.autograd imports it by name
        stack.enter_context(patch.object(module, "_engine_run_backward", engine))
    for owner, name in (
        (torch.Tensor, "register_hook"),
        (torch.Tensor, "register_post_accumulate_grad_hook"),
        (torch.nn.Module, "register_full_backward_hook"),
        (torch.nn.Module, "register_full_backward_pre_hook"),
    ):
        stack.enter_context(patch.object(owner, name, backward.registering(getattr(owner, name))))
    saved = torch.autograd.graph.saved_tensors_hooks
    stack.enter_context(patch.object(saved, "__init__", backward.saving(saved.__init__)))


def _open_safetensors(stack: ExitStack) -> None:
    """Let ``safe_open`` and ``load_file`` read files to simulated devices."""
    own: Callable[..., object] = safetensors.safe_open

    def safe_open(
        filename: object, framework: str, device: DeviceLike = "cpu", **kwargs: object
    ) -> object:
        if isinstance(device, str) and device.partition(":")[0] == DEVICE_TYPE:
            # safetensors knows the names of some device types only, but takes an index.
            device = active_machine().index_of(device)
        return own(filename, framework, device, **kwargs)

    for module in (safetensors, safetensors.torch):
        stack.enter_context(patch.object(module, "safe_open", safe_open))

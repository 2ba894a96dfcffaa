"""Operations for which the CPU's kernel alone is not enough.

- Copies go between devices.
- Reading a number waits for the executor; without values, the number is 0.
- Indices may be on the CPU.
- Tensors without values are equal if their shapes are.
"""

from __future__ import annotations

import torch

from tl_devicefix.placement.devices import DEVICE_TYPE
from tl_devicefix.simulation.executor import Args, Kwargs, Operation, zeros_for
from tl_devicefix.simulation.tensor import (
    HANDLERS,
    SimTensor,
    common_device,
    left_error,
    read,
    run_on_one_device,
    unwrap,
    wrap,
)

aten = torch.ops.aten


def _to_copy(func: Operation, args: Args, kwargs: Kwargs) -> object:
    """``.to`` and ``.cpu``: copy to another device, dtype or layout."""
    source: SimTensor = args[0]
    allocation = source._allocation
    machine = allocation.machine
    kwargs = dict(kwargs)
    target = kwargs.pop("device", None) or allocation.device
    index = None  # the host
    if target.type == DEVICE_TYPE:
        if not machine.is_open:
            raise left_error(allocation.device)
        target = machine.devices[machine.index_of(target)]
        index = target.index
    elif target.type != "cpu":  # such as "meta", to which nothing is transferred
        return func(source._cpu, **kwargs, device=target)
    result = machine.executor.run(func, (source._cpu,), kwargs, index)
    machine.record_transfer(allocation.device, target, result)
    return result if index is None else wrap(result, machine, target)


def copy_into(
    target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False
) -> torch.Tensor:
    """Copy in place between two devices, at least one of them simulated; record the transfer."""
    simulated: list[SimTensor] = []
    cpu_target, cpu_source = (unwrap(tensor, simulated, []) for tensor in (target, source))
    index = target.device.index if type(target) is SimTensor else None
    machine = simulated[0]._allocation.machine
    machine.executor.run(aten.copy_.default, (cpu_target, cpu_source, non_blocking), {}, index)
    machine.record_transfer(source.device, target.device, cpu_target)
    return target


def _read_number(func: Operation, args: Args, kwargs: Kwargs) -> object:
    """``.item()``, and with it ``if tensor:``; 0 where there are no values."""
    cpu = read(args[0])
    return func(zeros_for(cpu) if cpu.is_meta else cpu)


def _chosen_for(value: object) -> object:
    """Return a CPU tensor for which the same attention kernel is chosen as for a simulated one."""
    if type(value) is not SimTensor:
        return value
    cpu = value._cpu
    if cpu.is_meta:
        # Allocate one row: the choice depends on shapes, dtypes and the last stride only.
        cpu = torch.empty(cpu.shape[-1:], dtype=cpu.dtype, device="cpu").expand(cpu.shape)
    return cpu.detach().requires_grad_() if value.requires_grad else cpu


def _equal(func: Operation, args: Args, kwargs: Kwargs) -> object:
    """``equal`` and ``allclose``; tensors without values are equal if their shapes are."""
    if any(type(arg) is SimTensor and not arg.has_values for arg in args):
        common_device([arg for arg in args if type(arg) is SimTensor])  # raises if they differ
        return args[0].shape == args[1].shape
    return run_on_one_device(func, args, kwargs)


def _is_all_true(func: Operation, args: Args, kwargs: Kwargs) -> object:
    """Check that a condition holds for all values; it holds if there are no values."""
    return run_on_one_device(func, args, kwargs) if args[0].has_values else torch.tensor(True)


def _bincount(func: Operation, args: Args, kwargs: Kwargs) -> object:
    """``torch.bincount``; without values, the result has ``minlength`` bins."""
    counted, minlength = args[0], kwargs.get("minlength", args[2] if len(args) > 2 else 0)
    if type(counted) is not SimTensor or counted.has_values or not minlength:
        return run_on_one_device(func, args, kwargs)
    return counted.new_zeros(minlength)


def _histc(func: Operation, args: Args, kwargs: Kwargs) -> object:
    """``torch.histc``."""
    counted, *rest = args
    # CUDA counts integers, and the CPU refuses them: convert them to floats.
    if counted.is_floating_point():
        return run_on_one_device(func, args, kwargs)
    as_float = aten._to_copy.default(counted, dtype=torch.float64)
    counts = run_on_one_device(func, (as_float, *rest), kwargs)
    return aten._to_copy.default(counts, dtype=counted.dtype)


def _index_kernel(func: Operation, args: Args, kwargs: Kwargs) -> object:
    """Index with tensors that are on the CPU or on the indexed tensor's device."""
    indexed, indices, *rest = args
    on_devices = [index for index in indices if type(index) is SimTensor]
    if type(indexed) is not SimTensor or any(i.device != indexed.device for i in on_devices):
        raise RuntimeError(  # as torch says it
            "indices should be either on cpu or on the same device as the indexed tensor "
            f"({indexed.device})"
        )
    allocation = indexed._allocation
    # `index_put` may write a CPU scalar to any device.
    if rest and rest[0].dim() == 0 and type(rest[0]) is not SimTensor:
        machine, device = allocation.machine, allocation.device
        rest[0] = wrap(rest[0].to(machine.executor.data_device, copy=True), machine, device)
    cpu_indices = [index._cpu if type(index) is SimTensor else index for index in indices]
    return run_on_one_device(func, (indexed, _CheckedIndices(cpu_indices), *rest), kwargs)


# `unwrap` looks into plain lists only, so not into this one.
class _CheckedIndices(list[torch.Tensor | None]):
    """Index tensors on the CPU."""


HANDLERS.update(
    {
        aten._to_copy.default: _to_copy,
        aten.copy_.default: lambda func, args, kwargs: copy_into(*args, **kwargs),
        aten._local_scalar_dense.default: _read_number,
        # Choose the attention kernel that the CPU would.
        aten._fused_sdp_choice.default: lambda func, args, kwargs: func(
            *map(_chosen_for, args), **kwargs
        ),
        aten.equal.default: _equal,
        aten.allclose.default: _equal,
        aten._is_all_true.default: _is_all_true,
        aten.bincount.default: _bincount,
        aten.histc.default: _histc,
        aten.index.Tensor: _index_kernel,
        aten.index_put.default: _index_kernel,
        aten.index_put_.default: _index_kernel,
        aten._index_put_impl_.default: _index_kernel,
    }
)

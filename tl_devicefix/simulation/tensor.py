"""Simulated tensors, and their operations, which run on the CPU tensors behind them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any, SupportsIndex

import numpy as np
import torch

from tl_devicefix.errors import note_mixed_devices
from tl_devicefix.placement.devices import DEVICE_TYPE
from tl_devicefix.simulation.backward import raise_or_keep
from tl_devicefix.simulation.executor import Args, Kwargs, Operation, dense_tensors, zeros_for
from tl_devicefix.simulation.machine import Allocation, Machine

aten = torch.ops.aten

Handler = Callable[[Operation, Args, Kwargs], object]

# Keep torch's descriptor: `simulate` replaces `torch.Tensor.data`.
TENSOR_DATA = vars(torch._C.TensorBase)["data"]


class _LooksLikeTensor(torch._C._TensorMeta):
    """Makes ``type(x) == torch.Tensor`` true, which TransformerLens asserts."""

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is torch.Tensor

    def __hash__(cls) -> int:
        return hash(torch.Tensor)


class SimTensor(torch.Tensor, metaclass=_LooksLikeTensor):
    """A tensor that says it is on a simulated device; its values are in `_cpu` (on meta: none)."""

    _cpu: torch.Tensor
    _allocation: Allocation

    def __new__(cls, *args: Any, **kwargs: bool) -> Any:
        """Return a Parameter for ``type(parameter)(data, requires_grad=...)``, else a tensor."""
        if "requires_grad" not in kwargs:
            return torch.Tensor(*args, **kwargs)
        # Ignore the parameter's attributes, which accelerate passes too.
        return torch.nn.Parameter(args[0], requires_grad=kwargs["requires_grad"])

    # Disable it: it would cost each operation another Python call.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Operation, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        """Run ``func`` on the CPU tensors, and wrap what it returns."""
        return run(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        """Return what torch prints for a tensor on a device."""
        text = repr(read(self)).replace(", device='meta'", "")
        grad_fn = self.grad_fn
        extras = f", device='{self.device}'"
        if grad_fn is not None:
            extras += f", grad_fn=<{grad_fn.name()}>"
        elif self.requires_grad:
            extras += ", requires_grad=True"
        text = f"{text[:-1]}{extras})"
        return f"Parameter containing:\n{text}" if getattr(self, "_is_param", False) else text

    def __deepcopy__(self, memo: dict[int, object]) -> torch.Tensor:
        """Copy a leaf as torch does; ``memo`` keeps shared storages shared, but parameters'."""
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy"
                " protocol at the moment."
            )
        machine, device = self._allocation.machine, self._allocation.device
        is_parameter, data = getattr(self, "_is_param", False), read(self)
        data = data.detach().clone() if is_parameter else copy.deepcopy(data, memo)
        memo[id(self)] = copied = _leaf_like(self, wrap(data, machine, device))
        if is_parameter:
            return copied
        if self.grad is not None:
            copied.grad = copy.deepcopy(self.grad, memo)
        for name, value in self.__dict__.items():
            if name not in ("_cpu", "_allocation"):
                copied.__dict__[name] = copy.deepcopy(value, memo)
        return copied

    def __copy__(self) -> torch.Tensor:
        """Return another tensor on the same storage."""
        # The default would use `__reduce_ex__`, which copies to the CPU.
        return _leaf_like(self, self.detach())

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        """Save as a CPU tensor: a simulated device does not outlive its machine."""
        return _leaf_like(self, read(self).detach()).__reduce_ex__(protocol)

    def __format__(self, spec: str) -> str:
        """Format a scalar as its number."""
        # torch's own method does this for its own class only.
        return self.item().__format__(spec) if self.dim() == 0 else object.__format__(self, spec)

    def tolist(self) -> Any:
        """Return the values as nested lists."""
        # torch's own method refuses subclasses.
        values = read(self)
        return zeros_for(values).tolist() if values.is_meta else values.tolist()

    def numpy(self, *, force: bool = False) -> np.ndarray:
        """Raise the error that a CUDA tensor raises, unless forced."""
        # torch's own error is about subclasses, which does not help users.
        if force:
            return self.detach().cpu().numpy()
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy"
            " the tensor to host memory first."
        )

    def new_tensor(self, data: object, **options: Any) -> torch.Tensor:  # type: ignore[override]
        """Make a tensor on this device."""
        # torch's own method asks the device guard, which knows of index 0 only.
        given = {name: value for name, value in options.items() if value is not None}
        return torch.tensor(data, **{"dtype": self.dtype, "device": self.device, **given})

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """The values without history, like ``torch.Tensor.data``."""
        return TENSOR_DATA.__get__(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        set_data(self, value)

    def data_ptr(self) -> int:
        """Return the address of the values, by which libraries find tied tensors."""
        if not self._cpu.is_meta or not self._cpu.numel():
            return self._cpu.data_ptr()
        start = _storage_of(self._cpu).data_ptr()
        return start + int(self._cpu.storage_offset()) * self._cpu.itemsize

    @property
    def has_values(self) -> bool:
        """True if tensors have values; a dry run's have none."""
        return self._allocation.machine.has_values

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the CPU tensor's storage, by whose address libraries find shared memory."""
        return _storage_of(self._cpu)


def _leaf_like(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return detached values as a parameter, or with `requires_grad`, as the tensor has it."""
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(values, requires_grad=tensor.requires_grad)
    return values.requires_grad_(tensor.requires_grad)


_addresses = itertools.count(1 << 60, 1 << 40)  # beyond the address space of processes


class _Unallocated(torch.UntypedStorage):
    """A storage on meta that has an address."""

    # Libraries find tied tensors by their addresses, and torch gives 0 for all on meta.
    address: int

    def data_ptr(self) -> int:
        return self.address


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    storage = tensor.untyped_storage()
    if tensor.is_meta and type(storage) is torch.UntypedStorage:
        # torch returns the same object for the same storage, so it keeps this class.
        storage.__class__ = _Unallocated
        storage.address = next(_addresses)  # type: ignore[attr-defined]
    return storage


def read(tensor: SimTensor) -> torch.Tensor:
    """Return the CPU tensor that has the values, once the executor has them ready."""
    allocation = tensor._allocation
    return allocation.machine.executor.read(tensor._cpu, allocation.device.index)


def wrap(cpu: torch.Tensor, machine: Machine, device: torch.device) -> SimTensor:
    """Return ``cpu`` as a tensor on ``device``, which has an index; raise if memory is full."""
    # `is_conj` releases the GIL, so ask complex tensors only.
    if (cpu.is_complex() and cpu.is_conj()) or cpu.is_neg():
        # Resolve lazy conjugation and negation here: a wrapper subclass cannot have their bits.
        cpu = machine.executor.run(aten.clone.default, (cpu,), {}, device.index)
    # A sparse tensor has no storage, strides or offset of its own: its values and indices do.
    parts = dense_tensors(cpu) or [cpu]
    allocation, *_ = (machine.allocation_of(part, device) for part in parts)
    strides, offset = (cpu.stride(), cpu.storage_offset()) if len(parts) == 1 else (None, None)
    tensor = torch.Tensor._make_wrapper_subclass(
        SimTensor, cpu.size(), strides, offset, dtype=cpu.dtype, layout=cpu.layout, device=device
    )
    tensor._cpu = cpu
    tensor._allocation = allocation
    return tensor


def set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Assign ``tensor.data = value``, which may be on another device.

    ``nn.Module.to`` moves parameters in this way, so that tied weights stay one object.
    """
    if (type(tensor) is SimTensor) != (type(value) is SimTensor):
        _change_kind(tensor, value)
        return
    TENSOR_DATA.__set__(tensor, value)
    if type(tensor) is SimTensor and type(value) is SimTensor:
        # torch has replaced the metadata in C++; replace the values too.
        tensor._cpu, tensor._allocation = value._cpu, value._allocation


def _change_kind(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Turn a CPU tensor into a simulated one, or back, and keep the Python object."""
    # torch.utils.swap_tensors refuses while a graph holds the tensor, and removes the attributes
    # that a user has set on it.
    copied = _leaf_like(tensor, value.detach())
    grad, tensor.grad = tensor.grad, None
    tensor.__class__, copied.__class__ = copied.__class__, tensor.__class__
    for name in ("_cpu", "_allocation", "_is_param"):
        own, others = (vars(owner).pop(name, None) for owner in (tensor, copied))
        for owner, attribute in ((tensor, others), (copied, own)):  # a graph may hold `copied`
            if attribute is not None:
                vars(owner)[name] = attribute
    torch._C._swap_tensor_impl(tensor, copied)  # type: ignore[attr-defined]
    if grad is not None:
        set_data(grad, grad.to(tensor.device))
        tensor.grad = grad


def run(func: Operation, args: Args, kwargs: Kwargs) -> object:
    """Run ``func`` on the CPU, but check placement as a device would."""
    return _HANDLERS.get(func, run_on_one_device)(func, args, kwargs)


def run_on_one_device(func: Operation, args: Args, kwargs: Kwargs) -> object:
    """Run an operation whose operands are on one device; its results are on that device."""
    simulated: list[SimTensor] = []
    others: list[torch.Tensor] = []
    cpu_args = [unwrap(arg, simulated, others) for arg in args]
    cpu_kwargs = {name: unwrap(arg, simulated, others) for name, arg in kwargs.items()}
    only_reads = func.is_view or func is aten.clone.default  # views and copies of one tensor
    machine, device = common_device(simulated, needs_machine=not only_reads)
    if others:
        _check_cpu_operands(func, args[0], others, device)
    target = cpu_kwargs.pop("device", None)
    if target is not None:
        if target.type != DEVICE_TYPE:
            return func(*cpu_args, **cpu_kwargs, device=target)
        device = machine.devices[machine.index_of(target)]
    result = machine.executor.run(func, cpu_args, cpu_kwargs, device.index)
    return _wrap_result(result, simulated, machine, device)


def unwrap(arg: Any, simulated: list[SimTensor], others: list[torch.Tensor]) -> Any:
    """Return ``arg`` with CPU tensors in place of simulated ones; collect simulated and others."""
    kind = type(arg)
    if kind is SimTensor:
        simulated.append(arg)
        return arg._cpu
    if kind is list or kind is tuple:
        if arg and type(arg[0]) is int:  # a shape, the most frequent list
            return arg
        return [unwrap(item, simulated, others) for item in arg]
    if isinstance(arg, torch.Tensor):
        others.append(arg)
    return arg


def common_device(
    simulated: list[SimTensor], needs_machine: bool = True
) -> tuple[Machine, torch.device]:
    """Return the first operand's machine and device; raise an error if others differ."""
    allocation = simulated[0]._allocation
    machine, device = allocation.machine, allocation.device
    for tensor in simulated:
        other = tensor._allocation
        if needs_machine and not other.machine.is_open:
            raise left_error(other.device)
        if other.machine is not machine:
            raise RuntimeError(
                f"tensors on {device} and {other.device} belong to different simulated machines, "
                "such as a dry run's and that of the `simulate` around it: bring one to 'cpu' first"
            )
        if other.device is not device and other.device != device:  # `is` is faster
            raise_or_keep(_mixed_error(device, other.device))
    return machine, device


def _check_cpu_operands(
    func: Operation, first: object, operands: list[torch.Tensor], device: torch.device
) -> None:
    """Refuse CPU tensors among simulated ones, except for scalars that are read elementwise."""
    writes_to_cpu = func._schema.is_mutable and any(first is operand for operand in operands)
    for operand in operands:
        if writes_to_cpu or operand.dim() > 0 or not _takes_cpu_scalars(func):
            raise_or_keep(_mixed_error(device, operand.device))


def _wrap_result(
    result: object, simulated: list[SimTensor], machine: Machine, device: torch.device
) -> object:
    """Wrap a CPU kernel's results; for an operand changed in place, return that operand."""
    if isinstance(result, torch.Tensor):
        for tensor in simulated:
            if tensor._cpu is result:
                _refresh(tensor)
                return tensor
        return wrap(result, machine, device)
    if isinstance(result, (list, tuple)):
        return type(result)(_wrap_result(item, simulated, machine, device) for item in result)
    return result


def _refresh(tensor: SimTensor) -> None:
    """Update ``tensor`` if its CPU tensor was resized in place (``out=``, ``resize_``)."""
    cpu, old = tensor._cpu, tensor._allocation
    if cpu.layout is not torch.strided:  # a sparse tensor has no strides to update
        return
    allocation = old.machine.allocation_of(cpu, old.device)
    if tensor.size() == cpu.size() and tensor.stride() == cpu.stride() and allocation is old:
        return
    tensor.data = wrap(cpu.detach(), old.machine, old.device)
    tensor._cpu = cpu


# Kernels that take a CPU scalar although torch does not tag them as elementwise.
_TAKE_CPU_SCALARS = ("aten::fill", "aten::masked_fill", "aten::index_fill", "aten::_foreach")


def _takes_cpu_scalars(func: Operation) -> bool:
    return torch.Tag.pointwise in func.tags or func._schema.name.startswith(_TAKE_CPU_SCALARS)


def _mixed_error(one: torch.device, other: torch.device) -> RuntimeError:
    error = RuntimeError(
        "Expected all tensors to be on the same device, but found at least two devices,"
        f" {one} and {other}!"
    )
    if one.type == other.type:  # mixing with the CPU is an error on a single device too
        note_mixed_devices(error)
    return error


def left_error(device: torch.device) -> RuntimeError:
    """Return the error for computing with a tensor after its machine was left."""
    return RuntimeError(
        f"this tensor was on {device} of a simulated machine that has been left, so it can be read"
        " but not computed with: compute with its .cpu(), or load the model again within the"
        " `with simulate(...)` that you are in"
    )


# Operations for which the CPU's kernel alone is not enough.


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


_HANDLERS: dict[Operation, Handler] = {
    aten._to_copy.default: _to_copy,
    aten.copy_.default: lambda func, args, kwargs: copy_into(*args, **kwargs),
    aten._local_scalar_dense.default: _read_number,
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

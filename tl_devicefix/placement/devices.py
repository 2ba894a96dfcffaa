"""Devices: existence, names and free memory."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tl_devicefix.around import Args, Forward, Kwargs
from tl_devicefix.errors import shown
from tl_devicefix.placement.elsewhere import NOBODY, Elsewhere, TensorElsewhere, is_elsewhere

DEVICE_TYPE = "sim"
"""The type of simulated devices."""


DeviceLike = str | int | torch.device
"""A device as torch takes it, an index, or a name with its host: "host1/cuda:1"."""

CPU = torch.device("cpu")
"""The CPU, which also has the weights of offloaded blocks."""


def default_device() -> torch.device:
    """Return the device that TransformerLens would choose, with its index.

    Inside `tl_devicefix.simulate`, that is the current simulated device.
    """
    return simulated_device() or with_index(_unsimulated_device())


def _unsimulated_device() -> torch.device:
    try:  # imported late: reading saved activations needs no TransformerLens
        from transformer_lens.utilities import get_device
    except ImportError:  # TransformerLens 2.x
        from transformer_lens.utils import get_device
    return torch.device(get_device())


def simulated_device() -> torch.device | None:
    """Return the current simulated device; None outside of `tl_devicefix.simulate`."""
    # torch registers a device type's module as `torch.sim`. It has devices only in a simulation.
    simulated = getattr(torch, "sim", None)
    if simulated is None or simulated.device_count() == 0:
        return None
    return torch.device("sim", simulated.current_device())


def with_index(device: torch.device) -> torch.device:
    """Return `device` with an explicit index, so that "cuda" and "cuda:0" compare equal.

    Devices of types without an index (cpu, meta) are returned without one.
    """
    if is_elsewhere(device):
        return device
    if not has_index(device):
        return torch.device(device.type)
    if device.index is not None:
        return device
    module = torch.get_device_module(device.type)
    current = module.current_device() if hasattr(module, "current_device") else 0
    return torch.device(device.type, current)


def has_index(device: torch.device) -> bool:
    """Return True if there may be several devices of this type."""
    return device.type not in ("cpu", "meta") or is_elsewhere(device)


def module_with_streams(device: torch.device) -> Any:
    """Return torch's module of a device type, such as `torch.cuda`; None if it has no streams."""
    module = torch.get_device_module(device.type)
    return module if hasattr(module, "Stream") and device.type != "cpu" else None


_others = NOBODY


def set_others(others: Elsewhere) -> None:
    """Set what `others()` returns outside of simulations."""
    global _others
    _others = others


def others() -> Elsewhere:
    """Return the record of all hosts' devices; `NOBODY` within a simulation."""
    return _others if simulated_device() is None else NOBODY


def printed(device: torch.device) -> str:
    """Return a device's name as a user may give it."""
    return others().name_of(device)


def has_slash(named: object) -> bool:
    """Return True for a name with a host, such as "host1/cuda:3"."""
    return isinstance(named, str) and "/" in named


def is_device(named: object) -> bool:
    """Return True for a device, its index or its name, on this machine or another."""
    if isinstance(named, int) or has_slash(named):
        return True
    try:
        return isinstance(named, str | torch.device) and bool(torch.device(named).type)
    except RuntimeError:
        return False


def resolve(device: DeviceLike | None, home: torch.device | None = None) -> torch.device:
    """Turn a user's way of naming a device into a `torch.device` that exists.

    Args:
        device: a name, or an index among devices of home's type. Devices of other hosts have
            names with a slash, and the indices after this host's.
        home: the model's home. If it is None or the CPU, an index counts devices of the type that
            TransformerLens would choose.
    """
    if isinstance(device, bool) or (isinstance(device, int) and device < 0):
        raise ValueError(
            f"device '{device}' does not exist: give an index from 0 on, or a device's name"
        )
    if isinstance(device, int):
        numbered = home if home is not None and has_index(home) else default_device()
        if device < len(others().devices):
            return others().devices[device]
        return with_index(_existing(torch.device(numbered.type, device), repr(device)))
    if has_slash(device):
        return others().find(str(device))
    if not isinstance(device, str | torch.device):
        raise ValueError(
            f"a device must be an index or a name such as 'cuda:0', but is {shown(device)}"
        )
    if str(device).isdecimal():
        raise ValueError(f"device {device!r} is a string: write the index without quotes, {device}")
    try:
        return _existing(with_index(torch.device(device)), named=str(device))
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]  # such as "Torch not compiled with CUDA enabled"
        if reason.startswith("Expected one of cpu, cuda"):  # torch lists twenty others
            reason = (
                "torch calls GPUs 'cuda:0', 'cuda:1' and so on, Apple's 'mps', and the CPU 'cpu'; "
                "'sim:0' exists within `with tl_devicefix.simulate(4):`"
            )
        elif simulated_device() is not None:
            reason += "; leave device out, as this is within tl_devicefix.simulate"
        raise ValueError(f"device {str(device)!r} cannot be used here: {reason}") from error


def resolve_to_move(device: DeviceLike, home: torch.device) -> torch.device:
    """Resolve a device to move a model to. As in torch, 1 is "cuda:1" even if home is the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and not has_index(home) and not has_index(default_device()):
        home = accelerator
    return resolve(device, home)


def _existing(device: torch.device, named: str) -> torch.device:
    if (device.index or 0) >= device_count(device.type) and not is_elsewhere(device):
        is_left = device.type == DEVICE_TYPE and simulated_device() is None
        remedy = (
            "load within `with tl_devicefix.simulate(n):`" if is_left else "name one that is there"
        )
        raise ValueError(f"device {named!r} does not exist: {_there_are(device.type)}; {remedy}")
    return device


def _there_are(device_type: str) -> str:
    known = others()
    if any(device.type == device_type for device in known.devices):
        return f"the hosts have {len(known.devices)} ({known.listed})"
    return f"this machine has {device_count(device_type)} device(s) of type {device_type!r}"


def device_count(device_type: str) -> int:
    """Return the number of devices of this type; 1 for the CPU."""
    if device_type in ("cpu", "meta"):
        return 1
    module = torch.get_device_module(device_type)
    return int(module.device_count()) if hasattr(module, "device_count") else 1


def consecutive(first: torch.device, count: int) -> list[torch.device]:
    """Return `count` devices from `first` on; those of other hosts come last."""
    if count == 1:
        return [first]
    start = first.index or 0
    known = [*others().devices[start : start + count]]
    if len(known) == count and known[0] == first:
        return known
    if first.type == "cpu" or start + count > device_count(first.type):
        needs = f"needs {count} devices of type {first.type!r}, but {_there_are(first.type)}"
        if first.type == "cpu" and not (others().devices or torch.accelerator.is_available()):
            needs = f"needs {count} GPUs, but torch finds none here"
        raise ValueError(
            f"n_devices={count}, starting at {str(first)!r}, {needs}; lower n_devices, or leave "
            f"device out and load within `with tl_devicefix.simulate({count}):`"
        )
    return [torch.device(first.type, start + i) for i in range(count)]


def free_memory(device: torch.device) -> int | None:
    """Return the bytes that torch may still use on a device; None if it does not say.

    Memory of other processes counts as used. Memory that this process's caching allocator has
    reserved, and no tensor uses, counts as free. `set_per_process_memory_fraction` is respected.
    """
    if is_elsewhere(device):
        return others().free_memory(device)
    if device.type in ("cpu", "meta"):
        return None
    module = torch.get_device_module(device.type)
    if not hasattr(module, "mem_get_info"):
        return None
    try:
        free, total = module.mem_get_info(device)
    except RuntimeError as error:
        # Some XPUs and some builds of torch lack this query.
        if isinstance(error, NotImplementedError) or re.search("n[o']t support", str(error)):
            return None
        raise
    if not hasattr(module, "memory_reserved"):
        return int(free)
    allocated = module.memory_allocated(device)
    free += module.memory_reserved(device) - allocated
    if hasattr(module, "get_per_process_memory_fraction"):
        allowed = module.get_per_process_memory_fraction(device) * total - allocated
        free = min(free, allowed)  # negative if more was allocated before the fraction was set
    return max(int(free), 0)


def version_of(tensor: torch.Tensor) -> int | None:
    """Return how often a tensor was edited in place; None for inference tensors (no counter)."""
    return None if tensor.is_inference() else tensor._version


def stamp(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a value that differs once a tensor is replaced, frozen, edited, or has new `.data`."""
    return id(tensor), tensor.data_ptr(), version_of(tensor), tensor.requires_grad


def storage_of(tensor: torch.Tensor) -> int:
    """Return an identifier of a tensor's live storage, which its views share."""
    return tensor.untyped_storage()._cdata


def parameter_bytes(module: nn.Module) -> list[int]:
    """Return the bytes of a module's parameters; one number for those that share memory."""
    sizes: dict[int, int] = {}
    for tensor in module.parameters():
        # Asking a tensor of another host for its storage would fetch it.
        is_here = not isinstance(tensor, TensorElsewhere)
        key = storage_of(tensor) if is_here else id(tensor)
        sizes[key] = sizes.get(key, 0) + tensor.nbytes
        if is_here:
            sizes[key] = min(sizes[key], tensor.untyped_storage().nbytes())
    return list(sizes.values())


class SharedMemory:
    """Moves a module's parameters one by one; those that share memory still share it then.

    A Bridge's `attn.q` and `attn.qkv`, for example, are views of one tensor. Parameters of other
    modules are moved without the rest of their memory.
    """

    def __init__(self, module: nn.Module) -> None:
        n_bytes = defaultdict[int, list[int]](list)
        for parameter in module.parameters():
            n_bytes[storage_of(parameter)].append(parameter.nbytes)
        self._n_bytes = {storage: sum(each) for storage, each in n_bytes.items() if len(each) > 1}
        self._moved: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def moved(
        self, data: torch.Tensor, move: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Return a parameter's data as `move` returns it, or a view of the memory that it moved."""
        storage, key = data.untyped_storage(), (storage_of(data), data.dtype)
        if storage.nbytes() > self._n_bytes.get(storage_of(data), 0):
            return move(data)
        if key not in self._moved:
            whole = data.as_strided((storage.nbytes() // data.itemsize,), (1,), 0)
            self._moved[key] = move(whole)
        return self._moved[key].as_strided(data.shape, data.stride(), data.storage_offset())


def has_values(tensor: torch.Tensor) -> bool:
    """Return False for a tensor of a dry run, which has no values."""
    return getattr(tensor, "has_values", True)


class OwnRandomNumbers(TorchFunctionMode):
    """Fills this thread's tensors from a separate generator, within a `with` block.

    It applies to the functions in `_DRAWING`. torch's own generator is shared by all threads.
    """

    def __init__(self) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(0)

    def __torch_function__(
        self, func: Forward, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _DRAWING and kwargs.get("generator") is None:
            kwargs = {**kwargs, "generator": self._generator}
        return func(*args, **kwargs)


# Some functions of torch.nn.init hide their calls from the mode, so they are listed themselves.
_DRAWING = frozenset(
    (
        *("kaiming_normal_", "kaiming_uniform_", "xavier_normal_", "xavier_uniform_"),
        *("bernoulli_", "normal", "normal_", "rand", "randint", "randn", "randperm", "uniform_"),
    )
)


class EmptyOnMeta(TorchFunctionMode):
    """Makes this thread's `torch.empty` return meta tensors, within a `with` block.

    Weights of transformers' modules then take no memory, and rotary tables still have values.
    """

    def __torch_function__(
        self, func: Forward, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        if func is torch.empty and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)

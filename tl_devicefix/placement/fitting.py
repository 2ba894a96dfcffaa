"""Check that a placement fits into its devices' memory, and say where it does not."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import nn

from tl_devicefix.placement.devices import SharedMemory, free_memory, printed
from tl_devicefix.placement.elsewhere import is_elsewhere
from tl_devicefix.placement.in_use import placements_in_use
from tl_devicefix.placement.memory import MaxMemory, by_device, capacity, gib, is_out_of_memory
from tl_devicefix.placement.placement import Placement
from tl_devicefix.weight_processing import slices


def working_room(placement: Placement, dtype: torch.dtype) -> int:
    """Return the most bytes that loading needs beyond the weights: two slices in float32."""
    largest = max(component.weights for component in placement.components) // dtype.itemsize
    return 2 * 4 * min(largest, slices.ELEMENTS_ON_DEVICE)


def check_fit(placement: Placement, max_memory: MaxMemory | None) -> None:
    """Raise a ValueError if a device, or the host, has less room than its share needs."""
    limits = by_device(max_memory, placement.home, placement.devices)
    over, held = [], 0
    for memory in placement.memories:
        room, needed = capacity(memory, limits), placement.bytes_on(memory)
        if room is not None and needed > room:
            over.append(f"{printed(memory)} would hold {gib(needed)} but has {gib(room)} to use")
            free = free_memory(memory)
            if free is not None and needed > free:  # not the user's own limit
                held += sum(other.bytes_on(memory) for other in placements_in_use())
    if over:
        if held:
            over.append(f"where earlier models hold {gib(held)} until you `del` them")
        offload = ", or offload blocks: name 'cpu' in max_memory or device_map"
        is_offloaded = any(component.offloaded for component in placement.components)
        raise ValueError(
            f"the weights do not fit: {', '.join(over)}; use more devices, a larger max_memory or "
            f"a smaller dtype, put less there in device_map{'' if is_offloaded else offload}"
        )


def move_components(model: nn.Module, placement: Placement, rest: nn.Module) -> None:
    """Move each component of a model to its planned device, and the other tensors of `rest` home.

    A parameter that several components share goes to the first one's device.
    """
    placed: set[int] = set()
    mover = Mover()

    def move(module: nn.Module, device: torch.device, stored_on: torch.device) -> None:
        if is_elsewhere(device):  # its weights have no values here and count as placed
            placed.update(map(id, (*module.modules(), *module.parameters())))
        mover.sharing = SharedMemory(module)
        for submodule in module.modules():
            for name, parameter in submodule.named_parameters(recurse=False):
                if id(parameter) not in placed and not parameter.is_meta:
                    mover.move(submodule, name, stored_on)
                    placed.add(id(parameter))
            for name, buffer in submodule.named_buffers(recurse=False):
                if id(submodule) not in placed and not buffer.is_meta:
                    mover.move(submodule, name, device)
            placed.add(id(submodule))

    for component, module in placement.modules_of(model):
        with naming_full_devices(placement, component.name):
            move(module, component.device, component.stored_on)
    move(rest, placement.home, placement.home)


class Mover:
    """Moves tensors of modules. Buffers that modules on one device share stay shared.

    Attributes:
        sharing: of the module whose parameters are moved, if they are all moved to one device.
    """

    def __init__(self) -> None:
        self.sharing: SharedMemory | None = None
        self._buffers: dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}

    def move(self, module: nn.Module, name: str, device: torch.device) -> None:
        """Move a tensor: a parameter in place, with its gradient, so that optimizers keep it."""
        parameter, buffer = module._parameters.get(name), module._buffers.get(name)
        if buffer is not None:
            key = id(buffer), device
            if key not in self._buffers:
                # The dict keeps the buffer alive: a freed one's id may be reused.
                self._buffers[key] = buffer, buffer.to(device)
            module._buffers[name] = self._buffers[key][1]
        if parameter is not None:
            gradient = parameter.grad
            data = parameter.data
            if data.device != device:
                to = functools.partial(torch.Tensor.to, device=device)
                parameter.data = self.sharing.moved(data, to) if self.sharing else to(data)
            if gradient is not None and gradient.device != device:
                parameter.grad = gradient.to(device)


@contextlib.contextmanager
def naming_full_devices(placement: Placement | None, unit: str) -> Iterator[None]:
    """Turn an out-of-memory error into one that names the device, the unit and the remedy."""
    try:
        yield
    except RuntimeError as error:
        if placement is None or not is_out_of_memory(error):
            raise
        # A full host raises a plain RuntimeError, so the error's type shows which memory is full.
        device = placement.device_for(unit, is_weight=not isinstance(error, torch.OutOfMemoryError))
        # Keep three sentences: torch goes on with advice on its allocator.
        reason = ". ".join(" ".join(str(error).split()).split(". ")[:3]).rstrip(".")
        raise torch.OutOfMemoryError(
            f"{printed(device)} ran out of memory while {unit} was brought there or processed, "
            f"with {gib(placement.bytes_on(device))} planned for it ({reason}); free memory that "
            "others hold there, or load again with less on it: a smaller max_memory for it, more "
            "devices or a smaller dtype"
        ) from error

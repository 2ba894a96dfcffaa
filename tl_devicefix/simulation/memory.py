"""Memory of asynchronous devices, and pinned memory of the host: who used it, and when it is freed.

Memory without values yet is poisoned: all bits are 1, which is NaN, or -1.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tl_devicefix.simulation.geometry import tensors_in, written
from tl_devicefix.simulation.ordering import (
    Access,
    Launcher,
    Memory,
    Operation,
    RaceError,
    StreamKey,
    line,
)


def poisoned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, without values."""
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    storage.fill_(0xFF)
    return tensor


class DeviceMemory:
    """The memory of all devices, and the host's that is pinned."""

    def __init__(self, launcher: Launcher, pinned: Pinned) -> None:
        self._launcher = launcher
        self._pinned = pinned
        self._memories: dict[int, Memory] = {}  # by the address of the storage

    def allocate(self, tensor: torch.Tensor, stream: StreamKey) -> Memory:
        """Have a tensor's memory be a device's, taken on a stream just now."""
        operation = Operation("an allocation", stream, line())
        with self._launcher.lock:
            count = self._launcher.clocks.of(stream).get(stream, 0)
            return self.add(tensor, Access(operation, count))

    def add(self, tensor: torch.Tensor, access: Access) -> Memory:
        """Have a tensor's memory be a device's, taken and written by an operation."""
        with self._launcher.lock:
            memory = Memory(access, allocated=access.operation, storage=tensor.untyped_storage())
            self._memories[_address(tensor)] = memory
            return memory

    def memory_of(self, tensor: torch.Tensor) -> Memory | None:
        """Who used a tensor's memory, if that is a device's, or pinned."""
        memory = self._memories.get(_address(tensor))
        return self._pinned.memory_of(tensor) if memory is None else memory

    def of(self, tensors: Iterable[torch.Tensor]) -> list[Memory]:
        """Who used the memory of tensors: of those that are a device's, or pinned."""
        memories = map(self.memory_of, tensors_in(list(tensors)))
        return [memory for memory in memories if memory is not None]

    def free(self, memory: Memory) -> None:
        """Free the memory of a tensor that is gone."""
        assert memory.storage is not None
        assert memory.allocated is not None
        with self._launcher.lock:
            del self._memories[memory.storage._cdata]
            memory.storage = None
            if memory.is_recorded:  # so it is kept until the other streams have used it
                return
            stream, clocks = memory.allocated.where, self._launcher.clocks
            clocks.order(stream, clocks.host)
            other = memory.unordered(clocks.of(stream), writes=True)
            if other is not None:
                error = RaceError(
                    f"{other.operation} uses memory that was freed, and may be handed out again, "
                    f"before it has run; it was taken by {memory.allocated}: have stream "
                    f"{stream[1]} of sim:{stream[0]} wait for it before the tensor goes, or call "
                    "record_stream."
                )
                self._launcher.errors.append(error)


def _address(tensor: torch.Tensor) -> int:
    return torch._C._storage_address(tensor)  # type: ignore[attr-defined,no-any-return]


class Pinned:
    """The pinned memory of the host, and who used it."""

    def __init__(self) -> None:
        # By the address of the storage, which a weak reference keeps from being used again.
        self._memories: dict[int, tuple[StorageWeakRef, Memory]] = {}
        self._adding = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._memories)

    def memory_of(self, tensor: torch.Tensor) -> Memory | None:
        """Who used a tensor's memory; None if it is not pinned."""
        pinned = self._memories.get(_address(tensor))
        return None if pinned is None else pinned[1]

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's memory is pinned."""
        return tensor.device.type == "cpu" and self.memory_of(tensor) is not None

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """Say that a tensor's memory is pinned."""
        with self._adding:
            for address, (reference, _) in list(self._memories.items()):
                if reference.expired():
                    del self._memories[address]
            reference = StorageWeakRef(tensor.untyped_storage())
            self._memories[reference.cdata] = reference, Memory()
        return tensor

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Stand in for `Tensor.pin_memory`."""
        return tensor if self.has(tensor) else self.add(tensor.clone())


class WatchingHost(TorchDispatchMode):
    """Within it, the host's own use of pinned memory is seen, in the thread that entered.

    Args:
        pinned: the pinned memory.
        uses: told of an operation, and the tensors that it reads and writes.
    """

    def __init__(
        self,
        pinned: Pinned,
        uses: Callable[[str, Iterable[torch.Tensor], Iterable[torch.Tensor]], None],
    ) -> None:
        super().__init__()
        self._pinned = pinned
        self._uses = uses

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Look at the tensors of the host, and run ``func``."""
        kwargs = kwargs or {}
        if self._pinned and not func.is_view:
            tensors = tensors_in((args, tuple(kwargs.values())))
            if all(tensor.device.type == "cpu" for tensor in tensors):
                changed = written(func, args, kwargs)
                reads = [t for t in tensors if not any(t is other for other in changed)]
                self._uses(str(func), reads, changed)
        if kwargs.get("pin_memory"):
            return self._pinned.add(func(*args, **{**kwargs, "pin_memory": False}))
        return func(*args, **kwargs)

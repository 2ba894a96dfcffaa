"""Pinned memory of the host, which a device reads and writes when its queue gets there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tl_devicefix.simulation.geometry import written
from tl_devicefix.simulation.ordering import Memory


class Pinned:
    """The pinned memory of the host, and who used it."""

    def __init__(self) -> None:
        # By the address of the storage, which a weak reference keeps from being used again.
        self._memories: dict[int, tuple[StorageWeakRef, Memory]] = {}
        self._adding = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._memories)

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's memory is pinned."""
        return self.memory_of(tensor) is not None

    def memory_of(self, tensor: torch.Tensor) -> Memory | None:
        """Who used a tensor's memory, if it is pinned."""
        found = self._memories.get(torch._C._storage_address(tensor))  # type: ignore[attr-defined]
        return None if found is None else found[1]

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """Say that a tensor's memory is pinned."""
        with self._adding:
            for address, (reference, _) in list(self._memories.items()):
                if reference.expired():
                    del self._memories[address]
            reference = StorageWeakRef(tensor.untyped_storage())
            self._memories[reference.cdata] = reference, Memory()
        return tensor

    def pin(self, tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
        """Stand in for `Tensor.pin_memory`."""
        return tensor if self.has(tensor) else self.add(tensor.clone())

    def is_pinned(self, tensor: torch.Tensor, device: Any = None) -> bool:
        """Stand in for `Tensor.is_pinned`."""
        return tensor.device.type == "cpu" and self.has(tensor)


class WatchingHost(TorchDispatchMode):
    """Within it, what the host does with pinned memory itself is seen, in the thread that entered.

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
            tensors = _tensors((args, tuple(kwargs.values())))
            if all(tensor.device.type == "cpu" for tensor in tensors):
                changed = written(func, args, kwargs)
                reads = [t for t in tensors if not any(t is each for each in changed)]
                self._uses(str(func), reads, changed)
        if kwargs.get("pin_memory"):
            return self._pinned.add(func(*args, **{**kwargs, "pin_memory": False}))
        return func(*args, **kwargs)


def _tensors(arg: Any) -> list[torch.Tensor]:
    if isinstance(arg, torch.Tensor):
        return [arg]
    if isinstance(arg, (list, tuple)):
        return [tensor for each in arg for tensor in _tensors(each)]
    return []

"""Measurements of a simulated machine: memory on each device, and transfers between devices."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.fx.experimental._config as meta_config

from tl_devicefix.placement.devices import DEVICE_TYPE, DeviceLike
from tl_devicefix.placement.memory import format_table, gib
from tl_devicefix.simulation.backward import raise_or_keep
from tl_devicefix.simulation.executor import CpuExecutor, dense_tensors


@dataclass(frozen=True)
class Transfer:
    """One copy of a tensor from one device to another."""

    source: torch.device
    """The device the tensor was on."""
    target: torch.device
    """The device it was copied to."""
    bytes: int
    """The size of the copy, in bytes."""
    shape: torch.Size
    """The shape of the copy."""


@dataclass(frozen=True)
class Moved:
    """The sum of the copies from one device to another."""

    count: int
    """The number of copies."""
    bytes: int
    """The sum of their bytes."""


class Transfers(list[Transfer]):
    """A list of transfers, in the order they were made. Printing it shows a line for each pair."""

    def by_pair(self) -> dict[tuple[torch.device, torch.device], Moved]:
        """Sum the transfers of each pair: ``(source, target)`` -> count and bytes, in order."""
        sums: dict[tuple[torch.device, torch.device], Moved] = {}
        for transfer in self:
            pair = transfer.source, transfer.target
            so_far = sums.get(pair, Moved(0, 0))
            sums[pair] = Moved(so_far.count + 1, so_far.bytes + transfer.bytes)
        return dict(  # 0 for "cpu", which has no index
            sorted(sums.items(), key=lambda item: [(d.type, d.index or 0) for d in item[0]])
        )

    def __repr__(self) -> str:
        rows = [(f"{one} -> {other}", sums) for (one, other), sums in self.by_pair().items()]
        rows.append(("all", Moved(len(self), sum(transfer.bytes for transfer in self))))
        cells = [(name, str(sums.count), gib(sums.bytes)) for name, sums in rows]
        return format_table(cells, "<>>")


class Allocation:
    """The bytes of one storage on one simulated device; freed with the storage's last tensor."""

    def __init__(self, machine: Machine, device: torch.device) -> None:
        self.machine = machine
        self.device = device
        self.nbytes = 0

    def __del__(self) -> None:
        # Only queue the bytes: this may run in any thread at any moment. `_settle` subtracts them.
        self.machine._freed.append((self.device.index, self.nbytes))


class _CurrentDevice(threading.local):
    index = 0  # each thread has its own, as on CUDA


_ALLOCATION = "_tl_devicefix_allocation"  # the attribute of a storage


class Machine:
    """Simulated devices ``sim:0`` to ``sim:n-1``, with their memory and transfers.

    `tl_devicefix.simulate` makes it. Devices may be given as an index, a string such as
    ``"sim:1"`` or a ``torch.device``; all sizes are in bytes.

    Attributes:
        devices (list[torch.device]): the devices, in order.
        transfers (Transfers): every copy between two simulated devices, or between the CPU and one
            of them, since the start or the last `reset_transfers`. ``item()``, ``tolist()``,
            printing, and CPU tensors used as indices do not count. Printing the list shows one line
            for each pair of devices; ``transfers.by_pair()`` returns the same as a dict.
        is_open (bool): False once the ``with`` block is left.
    """

    def __init__(self, capacities: Sequence[int], executor: CpuExecutor) -> None:
        self.devices = [torch.device(DEVICE_TYPE, index) for index in range(len(capacities))]
        self.executor = executor
        # It is called with a device's index at each new peak of its memory.
        self.on_peak: Callable[[int], None] | None = None
        self.transfers = Transfers()
        self.current = _CurrentDevice()
        self.is_open = True
        self._capacities = list(capacities)
        self._allocated = [0] * len(capacities)
        self._peak = [0] * len(capacities)
        # (device index, bytes); appending to a deque needs no lock.
        self._freed: deque[tuple[int, int]] = deque()
        # The lock is reentrant: `_add` calls `_settle`.
        self._adding = threading.RLock()

    def __repr__(self) -> str:
        return f"Machine({len(self.devices)} devices{'' if self.is_open else ', left'})"

    @property
    def has_values(self) -> bool:
        """True if tensors have values; a dry run's have none."""
        return self.executor.data_device.type != "meta"

    def memory_allocated(self, device: DeviceLike | None = None) -> int:
        """Return the bytes of the live storages on ``device`` (default: the current one)."""
        self._settle()
        return self._allocated[self.index_of(device)]

    def max_memory_allocated(self, device: DeviceLike | None = None) -> int:
        """Return the peak of `memory_allocated` since the start or the last reset."""
        return self._peak[self.index_of(device)]

    def reset_peak_memory_stats(self, device: DeviceLike | None = None) -> None:
        """Set the peak of ``device`` to the memory that is allocated now."""
        self._peak[self.index_of(device)] = self.memory_allocated(device)

    def mem_get_info(self, device: DeviceLike | None = None) -> tuple[int, int]:
        """Return the free and the total bytes of ``device``."""
        total = self._capacities[self.index_of(device)]
        return total - self.memory_allocated(device), total

    def reset_transfers(self) -> None:
        """Forget the recorded transfers."""
        self.transfers.clear()

    def index_of(self, device: DeviceLike | None) -> int:
        """Return the index of ``device``; a device without an index is the current one.

        Raises:
            RuntimeError: if this machine has no such device.
        """
        if isinstance(device, str):
            device = torch.device(device)
        if isinstance(device, torch.device):
            if device.type != DEVICE_TYPE:
                raise RuntimeError(f"device must be a {DEVICE_TYPE} device, but is {device}")
            device = device.index
        index = self.current.index if device is None else device
        if not 0 <= index < len(self.devices):
            raise RuntimeError(
                f"device {DEVICE_TYPE}:{index} does not exist: there are {len(self.devices)}, "
                f"{DEVICE_TYPE}:0 to {self.devices[-1]}"
            )
        return index

    def check_room(self, device: torch.device, nbytes: int) -> None:
        """Raise CUDA's error if ``nbytes`` more do not fit on ``device``."""
        free, total = self.mem_get_info(device)
        if nbytes > free:
            raise_or_keep(
                torch.OutOfMemoryError(
                    f"{DEVICE_TYPE} out of memory. Tried to allocate {gib(nbytes)}. Device"
                    f" {device.index} has a total capacity of {gib(total)} of which {gib(free)} is"
                    " free."
                )
            )

    def allocation_of(self, tensor: torch.Tensor, device: torch.device) -> Allocation:
        """Return the allocation on ``device`` for the storage of the CPU tensor ``tensor``.

        Raises:
            torch.OutOfMemoryError: if a storage that is new or has grown does not fit.
        """
        # Keep the allocation on the storage's Python object: views share it, and it lives as long
        # as the storage.
        storage = tensor.untyped_storage()
        allocation: Allocation = vars(storage).get(_ALLOCATION) or Allocation(self, device)
        growth = storage.nbytes() - allocation.nbytes  # negative after `storage.resize_(0)`
        if growth:
            self.check_room(device, growth)
            self._add(device.index, growth)
            allocation.nbytes += growth
        vars(storage)[_ALLOCATION] = allocation  # last: `check_room` may raise
        return allocation

    def record_transfer(
        self, source: torch.device, target: torch.device, copy: torch.Tensor
    ) -> None:
        """Record ``copy``, made from ``source`` to ``target``, if these are two devices."""
        nbytes = sum(part.nbytes for part in dense_tensors(copy))
        # Skip empty copies: transformers' KV cache begins with empty tensors.
        if nbytes and source != target:
            self.transfers.append(Transfer(source, target, nbytes, copy.shape))

    def _add(self, index: int, nbytes: int) -> None:
        with self._adding:  # transformers loads in several threads
            self._settle()
            self._allocated[index] += nbytes
            if self._allocated[index] > self._peak[index]:
                self._peak[index] = self._allocated[index]
                if self.on_peak is not None:
                    self.on_peak(index)

    def _settle(self) -> None:
        """Subtract the memory that was freed since the last call."""
        with self._adding:
            while self._freed:
                index, nbytes = self._freed.popleft()
                self._allocated[index] -= nbytes


_active: Machine | None = None


def entered_machine() -> Machine | None:
    """Return the machine of the innermost `simulate`; None outside of one."""
    return _active


def active_machine() -> Machine:
    """Return the machine of the innermost `simulate`; raise outside of one."""
    if _active is None:
        raise RuntimeError(
            f"there is no {DEVICE_TYPE} device here: enter `with tl_devicefix.simulate(n):`, and "
            "load the model within it"
        )
    return _active


@contextmanager
def entered(machine: Machine) -> Iterator[Machine]:
    """Make a machine the active one in a `with` block; afterwards, its tensors can only be read."""
    global _active
    outer, _active = _active, machine
    try:
        # A mask without values selects everything. (mypy: torch adds `patch` at import.)
        with meta_config.patch(  # type: ignore[attr-defined]
            meta_nonzero_assume_all_nonzero=not machine.has_values
        ):
            yield machine
    finally:
        machine.is_open = False
        _active = outer

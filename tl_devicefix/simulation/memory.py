"""Memory of asynchronous devices, as a caching allocator has it, and pinned memory of the host.

Freed memory is handed out again at once, for an allocation on the same stream, while operations
that use it may still be queued. It is poisoned where the stream gets to its freeing: all bits are
1, which is NaN, or -1.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tl_devicefix.simulation.geometry import Geometry, tensors_in, written
from tl_devicefix.simulation.ordering import (
    Access,
    Launcher,
    Memory,
    Operation,
    RaceError,
    StreamKey,
    line,
)
from tl_devicefix.simulation.queues import Task

_ROUNDED_TO = 512
_POISON = 0xFF


class Block:
    """A piece of memory, and the storage that has it now; of 0 bytes, if that has its own.

    Attributes:
        stream: on which it is allocated, and handed out again.
        memory: who used it.
        base: a tensor on the storage that has it, whose address is no other's as long as this is.
        allocated: by which operation.
        recorded: other streams that use it, by `record_stream`.
    """

    def __init__(self, nbytes: int, stream: StreamKey) -> None:
        self.nbytes = nbytes
        self.stream = stream
        self.memory = Memory()
        self.base: torch.Tensor | None = None
        self.allocated: Operation | None = None
        self.recorded: set[StreamKey] = set()
        self._bytes = torch.full((nbytes,), _POISON, dtype=torch.uint8).numpy()

    def hand_out(self, nbytes: int) -> torch.Tensor:
        """Return its first bytes as a tensor with a storage of its own, of just that size."""
        self.base = torch.from_numpy(self._bytes[:nbytes])
        return self.base

    def poison(self) -> None:
        """Write over it."""
        self._bytes.fill(_POISON)


class DeviceMemory:
    """The memory of all devices, and the host's that is pinned.

    Attributes:
        settle: called before it looks which tensors are gone.
    """

    def __init__(self, launcher: Launcher, pinned: Pinned) -> None:
        self._launcher = launcher
        self._pinned = pinned
        self._blocks: dict[int, Block] = {}  # by the address of the storage
        self._pool: dict[tuple[StreamKey, int], list[Block]] = {}
        self._freed: deque[Block] = deque()  # by any thread, at any time
        self._recorded: list[tuple[Block, list[Task]]] = []  # until other streams' tasks are done
        self.settle: Callable[[], None] = lambda: None
        launcher.free_first = self._collect

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's memory is a device's."""
        return _address(tensor) in self._blocks

    def empty(self, geometry: Geometry, stream: StreamKey) -> torch.Tensor:
        """A tensor in memory that was taken for a stream, without values of its own."""
        self._collect()
        with self._launcher.lock:
            rounded = -(-max(geometry.nbytes, 1) // _ROUNDED_TO) * _ROUNDED_TO
            free = self._pool.get((stream, rounded))
            block = free.pop() if free else Block(rounded, stream)
            block.allocated = Operation("an allocation", stream, line())
            clocks = self._launcher.clocks
            count = clocks.of(stream).get(stream, 0)
            block.memory.use(Access(block.allocated, count), writes=True, host=clocks.host)
            base = block.hand_out(geometry.nbytes)
            tensor = torch.empty(0, dtype=geometry.dtype)
            tensor.set_(base.untyped_storage(), 0, geometry.shape, geometry.stride)
            self._blocks[_address(tensor)] = block
        return tensor

    def block_of(self, tensor: torch.Tensor, device: int) -> Block:
        """The memory of a tensor that is on a device from now on."""
        block = self._blocks.get(_address(tensor))
        if block is None:  # of a copy that was made on the host
            block = self._blocks[_address(tensor)] = Block(0, self._launcher.current(device))
            block.base = tensor.detach()
        return block

    def free(self, block: Block) -> None:
        """Let memory be handed out again. This may be called in the middle of anything."""
        self._freed.append(block)

    def of(self, tensors: Iterable[torch.Tensor]) -> list[Memory]:
        """Who used the memory of tensors: of those that are a device's, or pinned."""
        memories = []
        for tensor in tensors:
            block = self._blocks.get(_address(tensor))
            memory = self._pinned.memory_of(tensor) if block is None else block.memory
            if memory is not None:
                memories.append(memory)
        return memories

    def _collect(self) -> None:
        """Free the memory of tensors that are gone."""
        self.settle()
        with self._launcher.lock:
            while self._freed:
                self._free(self._freed.popleft())
            for block, tasks in list(self._recorded):
                if all(task.done for task in tasks):
                    self._recorded.remove((block, tasks))
                    block.memory = Memory()
                    block.poison()
                    self._give_back(block)

    def _give_back(self, block: Block) -> None:
        self._pool.setdefault((block.stream, block.nbytes), []).append(block)

    def _free(self, block: Block) -> None:
        assert block.base is not None
        del self._blocks[_address(block.base)]
        block.base = None
        if not block.nbytes:  # queued operations hold it
            return
        if block.recorded:
            streams = {*block.recorded, block.stream}
            self._recorded.append((block, self._launcher.last_tasks_on(streams)))
            block.recorded = set()
            return
        clocks = self._launcher.clocks
        clocks.order_after_host(block.stream)
        other = block.memory.unordered(clocks.of(block.stream), writes=True)
        if other is not None:
            device, stream = block.stream
            error = RaceError(
                f"{other.operation} uses memory that was freed, and may be handed out again, "
                f"before it has run; it was taken by {block.allocated}: have stream {stream} of "
                f"sim:{device} wait for it before the tensor goes, or call record_stream."
            )
            self._launcher.errors.append(error)
            block.memory = Memory()
        name = f"the freeing of what {block.allocated} took"
        self._launcher.launch(name, block.poison, block.stream, (), [block.memory])
        self._give_back(block)


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
        return self.memory_of(tensor) is not None

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

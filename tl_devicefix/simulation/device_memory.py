"""The memory of asynchronous devices: taken for a stream, and freed where the stream gets to it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import torch

from tl_devicefix.simulation.geometry import Geometry
from tl_devicefix.simulation.giving import Giving, line
from tl_devicefix.simulation.ordering import Access, Memory, Operation, RaceError, StreamKey
from tl_devicefix.simulation.pinned import Pinned
from tl_devicefix.simulation.pool import Block, Pool
from tl_devicefix.simulation.queues import Task


class DeviceMemory:
    """The memory of all devices, and the host's that is pinned.

    Args:
        giving: which gives the freeing of memory to its stream.
        pinned: the host's.

    Attributes:
        settle: called before it is looked what was let go of.
    """

    def __init__(self, giving: Giving, pinned: Pinned) -> None:
        self._giving = giving
        self._pinned = pinned
        self._pool = Pool()
        self._blocks: dict[int, Block] = {}
        self._freed: deque[Block] = deque()  # by any thread, at any time
        self._limbo: list[tuple[Block, list[Task]]] = []
        self.settle: Callable[[], None] = lambda: None
        giving.free_first = self._collect

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's memory is a device's."""
        return _address(tensor) in self._blocks

    def empty(self, geometry: Geometry, stream: StreamKey) -> torch.Tensor:
        """A tensor in memory that was taken for a stream, without values of its own."""
        self._collect()
        with self._giving.lock:
            block = self._pool.take(geometry.nbytes, stream)
            block.allocated = Operation("an allocation", stream, line())
            clocks = self._giving.clocks
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
            block = self._blocks[_address(tensor)] = Block(0, self._giving.current(device))
            block.base = tensor.detach()
        return block

    def free(self, block: Block) -> None:
        """Let memory be handed out again. This may be called in the middle of anything."""
        self._freed.append(block)

    def of(self, tensors: Iterable[torch.Tensor]) -> list[Memory]:
        """Who used the memory of tensors: of those that are a device's, or pinned."""
        found = []
        for tensor in tensors:
            block = self._blocks.get(_address(tensor))
            memory = self._pinned.memory_of(tensor) if block is None else block.memory
            if memory is not None:
                found.append(memory)
        return found

    def _collect(self) -> None:
        """Free what has been let go of."""
        self.settle()
        with self._giving.lock:
            while self._freed:
                self._free(self._freed.popleft())
            for block, tasks in list(self._limbo):
                if all(task.done for task in tasks):
                    self._limbo.remove((block, tasks))
                    block.memory = Memory()
                    block.poison()
                    self._pool.give_back(block)

    def _free(self, block: Block) -> None:
        assert block.base is not None
        del self._blocks[_address(block.base)]
        block.base = None
        if not block.nbytes:  # what is queued holds it
            return
        if block.recorded:
            streams = {*block.recorded, block.stream}
            self._limbo.append((block, self._giving.last_tasks_on(streams)))
            block.recorded = set()
            return
        clocks = self._giving.clocks
        clock = clocks.of(block.stream)
        clocks.order_after_host(block.stream)
        other = block.memory.unordered(clock, writes=True)
        if other is not None:
            self._giving.errors.append(_freed_too_early(block, other))
            block.memory = Memory()
        name = f"the freeing of what {block.allocated} took"
        self._giving.give(name, block.poison, block.stream, (), [block.memory])
        self._pool.give_back(block)


def _address(tensor: torch.Tensor) -> int:
    return torch._C._storage_address(tensor)  # type: ignore[attr-defined,no-any-return]


def _freed_too_early(block: Block, other: Access) -> RaceError:
    device, stream = block.stream
    return RaceError(
        f"{other.operation} uses memory that was freed, and may be handed out again, before it has "
        f"run; it was taken by {block.allocated}: have stream {stream} of sim:{device} wait for it "
        "before the tensor goes, or call record_stream."
    )

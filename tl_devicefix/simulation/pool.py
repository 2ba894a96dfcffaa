"""The memory of an asynchronous device, as a caching allocator has it.

What is freed is handed out again at once, for what is allocated on the same stream, while what
was queued with it may still be to run. It is poisoned where the stream gets to its freeing: all
bits are 1, which is NaN, or -1.
"""

from __future__ import annotations

import torch

from tl_devicefix.simulation.ordering import Memory, Operation, StreamKey

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


class Pool:
    """The memory of all devices, by the stream it is for."""

    def __init__(self) -> None:
        self._free: dict[tuple[StreamKey, int], list[Block]] = {}

    def take(self, nbytes: int, stream: StreamKey) -> Block:
        """The block that was freed last on a stream, or a new one."""
        rounded = -(-max(nbytes, 1) // _ROUNDED_TO) * _ROUNDED_TO
        free = self._free.get((stream, rounded))
        return free.pop() if free else Block(rounded, stream)

    def give_back(self, block: Block) -> None:
        """Let a block be handed out again."""
        self._free.setdefault((block.stream, block.nbytes), []).append(block)

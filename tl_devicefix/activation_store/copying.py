"""Copies of activations to host memory, beside what devices compute, in memory that is bounded."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from tl_devicefix.activation_store.on_hosts import Group, HostMemory

_ALIGNED = 64


def room_for(sizes: Iterable[int]) -> int:
    """Bytes that tensors of these sizes take in a part of a buffer."""
    return sum(-(-size // _ALIGNED) * _ALIGNED for size in sizes)


class Ring:
    """Buffers in host memory that are used again, and are bounded: who wants one more waits.

    They hold two shards, so that one is written while the next one fills, and some batches: those
    whose runs are under way, and those that two shards have a part of. With fewer, the writer
    would wait for a batch that waits for the writer. They are counted in examples, which say when
    a shard is full.

    Args:
        per_shard: how many examples a shard has.
        n_batches: how many batches there may be besides.
        memory: of the host.
        groups: names of the tensors in each part of a buffer.
    """

    def __init__(
        self, per_shard: int, n_batches: int, memory: HostMemory, groups: Sequence[Group]
    ) -> None:
        self.memory = memory
        self._per_shard, self._n_batches, self._groups = per_shard, n_batches, groups
        self._largest = 0
        self._free: list[Buffer] = []
        self._in_use = 0
        self._changed = threading.Condition()
        self._error: BaseException | None = None

    def take(self, n_examples: int, sizes: list[int]) -> Buffer:
        """A buffer for so many examples, with parts of some sizes; waits until there is room.

        Raises:
            BaseException: the one of `fail`, which ends the waiting.
        """
        with self._changed:
            self._largest = max(self._largest, n_examples)
            most = 2 * self._per_shard + self._n_batches * self._largest
            while self._error is None and self._in_use + n_examples > most:
                self._changed.wait()
            if self._error is not None:
                raise self._error
            fitting = next((each for each in self._free if each.sizes == sizes), None)
            if fitting is None:
                self._free.clear()  # of other sizes, in whose place the new one comes
                fitting = Buffer(self, n_examples, sizes, self._groups)
            else:
                self._free.remove(fitting)
            self._in_use += n_examples
            return fitting

    def give_back(self, buffer: Buffer) -> None:
        """Let a buffer be used again."""
        with self._changed:
            self._in_use -= buffer.n_examples
            self._free.append(buffer)
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Have whoever waits for a buffer, or takes one from now on, get an error."""
        with self._changed:
            self._error = error
            self._changed.notify_all()


class Buffer:
    """Host memory for what is kept of one batch: in each part, what is of one device."""

    def __init__(
        self, ring: Ring, n_examples: int, sizes: list[int], groups: Sequence[Group]
    ) -> None:
        self.n_examples, self.sizes = n_examples, sizes
        self._ring, self._groups = ring, groups
        self._parts = [ring.memory.empty(size) for size in sizes]
        self._arriving: list[Any] = []
        self._users = 1
        self._counting = threading.Lock()

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Start to copy tensors here, which have names; they are there after `wait`."""
        copies = {}
        devices = set()
        for part, names in zip(self._parts, self._groups):
            end = 0
            for name in names:
                tensor = tensors[name]
                here = part[end : end + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                end += room_for([tensor.nbytes])
                copies[name] = here
                self._ring.memory.copy(here, tensor)
                devices.add(tensor.device)
        self._arriving = self._ring.memory.arrivals(devices)
        return copies

    def wait(self) -> None:
        """Return when what was copied is here."""
        for arrived in self._arriving:
            arrived.synchronize()

    def keep(self) -> None:
        """Count someone more who needs what is here."""
        with self._counting:
            self._users += 1

    def let_go(self) -> None:
        """Count someone less; after the last, it is used again."""
        with self._counting:
            self._users -= 1
            done = self._users == 0
            self._users = self._users or 1  # the next who takes it
        if done:
            self._ring.give_back(self)

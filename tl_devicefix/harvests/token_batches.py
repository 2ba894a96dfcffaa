"""Batches of tokens' activations in a shuffled order, for training on them.

The order is made of blocks: rows that follow each other on disk. All blocks are shuffled, and as
many as a shard has bytes are read at a time and their rows shuffled together, while those before
them are handed out. So memory is bounded, and what is read is read in pieces of a size that disks
are good at.
"""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch

from tl_devicefix.harvests.stored import Stored

BYTES_OF_BLOCK = 2**18
Shuffle = bool | Literal["exact"]


class _Group(NamedTuple):
    """Rows that are read together."""

    epoch: int
    rows: torch.Tensor
    order: torch.Tensor | None
    """The order in which they are handed out."""


class TokenBatches(Iterator[torch.Tensor]):
    """Batches `[batch_size, ...]` of one activation's rows, each row once an epoch.

    `shuffle=True` promises that: a true permutation of all rows, but not any permutation alike.
    Rows come in groups of a shard's size, a group is blocks of 256 KiB from anywhere in the
    harvest, and within it any order is as likely as any other. `shuffle="exact"` is a permutation
    drawn from all alike: each row is read by itself, which is slower from a disk. The order is the
    same for the same seed, and another in each epoch. An epoch's last batch has what is left.

    A thread reads ahead. `state_dict()` says how many batches were handed out, and
    `load_state_dict` goes on from there.

    Args:
        stored: the activation. Its rows are tokens, if it has an axis for them.
        batch_size: rows in a batch.
        shuffle: False for the order on disk, True, or "exact".
        seed: of the order.
        device: where batches are brought; by default they are on the CPU.
        epochs: how often all rows are handed out; None for ever.
        group_bytes: of a group, of which two are in memory.
        by_token: whether the second axis is tokens, so that rows are tokens.

    Raises:
        ValueError: for a size or number that is none.
    """

    def __init__(
        self,
        stored: Stored,
        batch_size: int,
        *,
        shuffle: Shuffle,
        seed: int,
        device: Any,
        epochs: int | None,
        group_bytes: int,
        by_token: bool,
    ) -> None:
        for name, value in (("batch_size", batch_size), ("epochs", epochs)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be 1 or more, but is {value!r}")
        self._rows = _Rows(stored, by_token)
        self._batch_size, self._seed, self._epochs = batch_size, seed, epochs
        self._shuffle, self._device = shuffle, device
        self._group_rows = max(1, group_bytes // self._rows.bytes)
        self._given = 0
        self._reader: _Reader | None = None
        self._group: _Group | None = None
        self._at = 0

    def __len__(self) -> int:
        """Batches of all epochs.

        Raises:
            TypeError: if there is no end of them.
        """
        if self._epochs is None:
            raise TypeError("there is no end of these batches, as epochs is None")
        return self._epochs * self._batches_of_epoch

    @property
    def _batches_of_epoch(self) -> int:
        return -(-self._rows.count // self._batch_size)

    def __next__(self) -> torch.Tensor:
        if not self._rows.count or (self._epochs is not None and self._given >= len(self)):
            self.close()
            raise StopIteration
        size = min(
            self._batch_size,
            self._rows.count - self._given % self._batches_of_epoch * self._batch_size,
        )
        parts: list[torch.Tensor] = []
        while size:
            parts.append(self._take(size))
            size -= len(parts[-1])
        self._given += 1
        batch = parts[0] if len(parts) == 1 else torch.cat(parts)
        return batch if self._device is None else batch.to(self._device)

    def _take(self, most: int) -> torch.Tensor:
        """The next rows of what was read, as many as are wanted and there."""
        if self._group is None:
            if self._reader is None:
                self._reader = self._reading_on()
            self._group = self._reader.next()
        group = self._group
        rows = slice(self._at, self._at + most)
        if group.order is None:  # a copy, or a batch would keep all that was read with it
            taken = group.rows[rows].clone()
        else:  # a row at a time, where group.rows[...] copies number by number
            taken = group.rows.index_select(0, group.order[rows])
        self._at += len(taken)
        if self._at >= len(group.rows):
            self._group, self._at = None, 0
        return taken

    def _reading_on(self) -> _Reader:
        """A thread that reads from the next batch on."""
        epoch, batch = divmod(self._given, self._batches_of_epoch)
        self._at = batch * self._batch_size
        blocks = self._rows.blocks(self._rows_of_block())
        plan = _Plan(blocks, self._group_rows, bool(self._shuffle), self._seed)
        first, self._at = plan.find(epoch, self._at)
        return _Reader(self._rows, plan, epoch, first, self._epochs)

    def _rows_of_block(self) -> int:
        return 1 if self._shuffle == "exact" else max(1, BYTES_OF_BLOCK // self._rows.bytes)

    @property
    def config(self) -> dict[str, Any]:
        """What these are batches of, as dictionary_learning saves it beside what it trains."""
        return {
            "harvest": self._rows.name,
            "d_submodule": self._rows.shape[-1],
            "shuffle": self._shuffle,
            "epochs": self._epochs,
            "seed": self._seed,
            "out_batch_size": self._batch_size,
        }

    def state_dict(self) -> dict[str, int]:
        """How far it is, for `load_state_dict` of batches with the same arguments."""
        return {"batches": self._given, "seed": self._seed, "batch_size": self._batch_size}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from where others were.

        Raises:
            ValueError: if those had another seed or batch size.
        """
        own = self.state_dict()
        for name in ("seed", "batch_size"):
            if state[name] != own[name]:
                raise ValueError(
                    f"these batches have {name}={own[name]}, but those that are gone on with had "
                    f"{state[name]}"
                )
        self.close()
        self._given = state["batches"]

    def close(self) -> None:
        """End the thread that reads, and let go of what it has read."""
        if self._reader is not None:
            self._reader.close()
        self._reader, self._group, self._at = None, None, 0

    def __del__(self) -> None:
        if getattr(self, "_reader", None) is not None:
            self.close()


class _Rows:
    """The rows of an activation, across all shards."""

    def __init__(self, stored: Stored, by_token: bool) -> None:
        entry = stored.entry
        if entry.axis == "shared":
            raise ValueError(f"{entry.name} is one tensor for all examples, and has no tokens")
        self._stored = stored
        self.name = entry.name
        n_tokens = entry.shape[0] if by_token and entry.axis == "example" else 1
        self._flat = by_token and entry.axis == "example"
        self.shape = entry.shape[1:] if self._flat else entry.shape
        self.dtype = stored.dtype
        self.of_shards = [n * n_tokens for n in stored.rows_of_shards()]
        self.count = sum(self.of_shards)
        self.bytes = max(1, entry.row_bytes // n_tokens)
        self._mapped: dict[int, torch.Tensor] = {}

    def blocks(self, n_rows: int) -> torch.Tensor:
        """All blocks of at most so many rows: (shard, first row, rows) of each, `[blocks, 3]`."""
        found = []
        for shard, count in enumerate(self.of_shards):
            starts = torch.arange(0, count, n_rows, device="cpu")
            sizes = (count - starts).clamp(max=n_rows)
            found.append(torch.stack([torch.full_like(starts, shard), starts, sizes], 1))
        return torch.cat(found)

    def read(self, blocks: torch.Tensor) -> torch.Tensor:
        """The rows of some blocks, in the order in which they lie."""
        out = torch.empty((int(blocks[:, 2].sum()), *self.shape), dtype=self.dtype, device="cpu")
        at = 0
        for shard, start, size in sorted(blocks.tolist()):
            out[at : at + size] = self._of_shard(shard)[start : start + size]
            at += size
        return out

    def _of_shard(self, shard: int) -> torch.Tensor:
        if shard not in self._mapped:
            rows = self._stored.of_shard(shard)
            self._mapped[shard] = rows.flatten(0, 1) if self._flat else rows
        return self._mapped[shard]


class _Plan:
    """Which blocks are in which group, and in what order a group's rows are handed out."""

    def __init__(self, blocks: torch.Tensor, group_rows: int, shuffle: bool, seed: int) -> None:
        self._blocks, self._group_rows = blocks, group_rows
        self._shuffle, self._seed = shuffle, seed
        self._epoch = -1
        self._groups: tuple[torch.Tensor, ...] = ()

    def groups(self, epoch: int) -> tuple[torch.Tensor, ...]:
        """The blocks of each group of an epoch."""
        if epoch != self._epoch:
            blocks = self._blocks
            if self._shuffle:
                blocks = blocks[self._permutation(len(blocks), epoch, -1)]
            # A block is in the group in which its last row is.
            group = (blocks[:, 2].cumsum(0) - 1) // self._group_rows
            sizes = group.unique_consecutive(return_counts=True)[1]
            self._groups, self._epoch = blocks.split(sizes.tolist()), epoch
        return self._groups

    def order(self, epoch: int, group: int, n_rows: int) -> torch.Tensor | None:
        """The order of a group's rows; None for that in which they lie."""
        if not self._shuffle:
            return None
        return self._permutation(n_rows, epoch, group)

    def find(self, epoch: int, row: int) -> tuple[int, int]:
        """In which group a row is that is handed out as the n-th of an epoch, and where in it."""
        for number, blocks in enumerate(self.groups(epoch)):
            size = int(blocks[:, 2].sum())
            if row < size:
                return number, row
            row -= size
        return len(self.groups(epoch)), 0

    def _permutation(self, count: int, epoch: int, group: int) -> torch.Tensor:
        """One that is the same wherever it is drawn, so that others need not be drawn before."""
        drawn_from = hashlib.sha256(f"{self._seed} {epoch} {group}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(drawn_from[:8], "big"))
        return torch.randperm(count, generator=generator, device="cpu")


class _Reader:
    """A thread that reads groups from one on, one ahead of what is handed out."""

    def __init__(
        self, rows: _Rows, plan: _Plan, epoch: int, group: int, epochs: int | None
    ) -> None:
        self._read: queue.Queue[_Group | BaseException] = queue.Queue(1)
        self._free = threading.Semaphore(1)
        self._over = threading.Event()
        self._thread = threading.Thread(
            target=self._work,
            args=(rows, plan, epoch, group, epochs),
            name="harvest reader",
            daemon=True,
        )
        self._thread.start()

    def next(self) -> _Group:
        """The next group; now the one after it is read.

        Raises:
            Exception: what went wrong in reading.
        """
        read = self._read.get()
        self._free.release()
        if isinstance(read, BaseException):
            raise read
        return read

    def close(self) -> None:
        """End the thread."""
        self._over.set()
        self._free.release()
        self._thread.join()

    def _work(self, rows: _Rows, plan: _Plan, epoch: int, group: int, epochs: int | None) -> None:
        try:
            while epochs is None or epoch < epochs:
                for number, blocks in enumerate(plan.groups(epoch)):
                    if number < group:
                        continue
                    self._free.acquire()
                    if self._over.is_set():
                        return
                    read = rows.read(blocks)
                    self._read.put(_Group(epoch, read, plan.order(epoch, number, len(read))))
                epoch, group = epoch + 1, 0
        except BaseException as error:  # noqa: BLE001  # raised where it is waited for
            self._read.put(error)

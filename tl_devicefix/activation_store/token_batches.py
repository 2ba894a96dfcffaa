"""Batches of tokens' activations in a shuffled order, for training on them.

The order is made of blocks: rows that follow each other on disk. All blocks are shuffled. A group
of them is read at a time, each row to the place in memory that the order gives it, while the group
before it is handed out. So memory is bounded, disks read pieces of a size that they are good at,
and each row is copied once.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
import torch

from tl_devicefix.activation_store.shards import Stored

BYTES_OF_BLOCK = 2**18
Shuffle = bool | Literal["exact"]


class TokenBatches(Iterator[torch.Tensor]):
    """Batches `[batch_size, ...]` of one activation's rows, each row once an epoch.

    `shuffle=True` promises that: a true permutation of all rows, but not every permutation is as
    likely. Rows come in groups of half a shard's bytes, a group is blocks of 256 KiB from anywhere
    on disk, and within it any order is as likely as any other. `shuffle="exact"` is a permutation
    drawn from all alike: each row is read by itself, which is slower from a disk, and the order
    takes some 50 bytes of memory a row. The order is the same for the same seed, and another in
    each epoch. An epoch's last batch has the rows that are left.

    A thread reads ahead, into memory that is used again when nobody has a batch of it any more:
    three groups of it, if you let go of batches. A batch that you keep keeps its group; clone it.
    `state_dict()` says how many batches were handed out, and `load_state_dict` goes on from there.

    Args:
        stored: the activation.
        batch_size: rows in a batch.
        shuffle: False for the order on disk, True, or "exact".
        seed: of the order.
        device: where batches are brought; by default they are on the CPU.
        epochs: how often all rows are handed out; None for ever.
        group_bytes: of a group, of which three are in memory.
        by_token: whether the second axis is tokens, so that rows are tokens.

    Raises:
        ValueError: for a size or number below 1, or another `shuffle`.
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
        if shuffle not in (True, False, "exact"):
            raise ValueError(f'shuffle must be True, False or "exact", but is {shuffle!r}')
        for name, value in (("batch_size", batch_size), ("epochs", epochs)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be 1 or more, but is {value!r}")
        self._rows = _Rows(stored, by_token)
        self._batch_size, self._seed, self._epochs = batch_size, seed, epochs
        self._shuffle, self._device = shuffle, device
        self._group_rows = max(1, group_bytes // self._rows.bytes)
        self._handed_out = 0
        self._running: Generator[torch.Tensor, None, None] | None = None

    def __len__(self) -> int:
        """Batches of all epochs.

        Raises:
            TypeError: if `epochs` is None, so that they do not end.
        """
        if self._epochs is None:
            raise TypeError("these batches have no length, as they do not end: epochs is None")
        return self._epochs * self._batches_of_epoch

    @property
    def _batches_of_epoch(self) -> int:
        return -(-self._rows.count // self._batch_size)

    def __next__(self) -> torch.Tensor:
        if not self._rows.count or (self._epochs is not None and self._handed_out >= len(self)):
            self.close()
            raise StopIteration
        try:
            if self._running is None:
                self._running = self._from_here()
            batch = next(self._running)
            batch = batch if self._device is None else batch.to(self._device)
        except BaseException:
            self.close()  # so that the next try reads this batch again, from its first row
            raise
        self._handed_out += 1
        return batch

    def _from_here(self) -> Generator[torch.Tensor, None, None]:
        epoch, batch = divmod(self._handed_out, self._batches_of_epoch)
        block_rows = 1 if self._shuffle == "exact" else max(1, BYTES_OF_BLOCK // self._rows.bytes)
        groups = _Groups(self._rows, block_rows, self._group_rows, bool(self._shuffle), self._seed)
        row = batch * self._batch_size
        number, skip = groups.find(epoch, row)
        # Not a method of this object, so that dropping it ends the thread.
        read = _ahead(groups.read(epoch, number, self._epochs))
        return _batches(read, skip, self._batch_size, self._rows.count - row, self._rows.count)

    @property
    def config(self) -> dict[str, Any]:
        """A description of these batches, which dictionary_learning saves beside its models."""
        return {
            "activation": self._rows.name,
            "d_submodule": self._rows.shape[-1],
            "shuffle": self._shuffle,
            "epochs": self._epochs,
            "seed": self._seed,
            "out_batch_size": self._batch_size,
        }

    def state_dict(self) -> dict[str, Any]:
        """The position in the batches, for `load_state_dict` of batches with the same arguments.

        Returns:
            Plain numbers and texts, which you can save beside a training run.
        """
        return {
            "batch_size": self._batch_size,
            "name": self._rows.name,
            "rows": self._rows.count,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "batches": self._handed_out,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where others were.

        Args:
            state: which their `state_dict()` returned.

        Raises:
            ValueError: if those were of another activation, or in another order.
        """
        for name, own in self.state_dict().items():
            if name != "batches" and state.get(name) != own:
                raise ValueError(
                    f"the state has {name}={state.get(name)!r}, but these batches have {own!r}: "
                    "make them with the arguments of those whose state_dict() this is"
                )
        self.close()
        self._handed_out = state["batches"]

    def close(self) -> None:
        """End the thread that reads, and let go of what it has read."""
        if self._running is not None:
            self._running.close()
            self._running = None


def _ahead(groups: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The same; a thread reads one while the one before it is used."""
    with ThreadPoolExecutor(1, thread_name_prefix="activations reader") as reader:
        future = reader.submit(next, groups, None)
        while (group := future.result()) is not None:
            future = reader.submit(next, groups, None)
            yield group


def _batches(
    groups: Iterator[torch.Tensor], skip: int, batch_size: int, left: int, of_epoch: int
) -> Generator[torch.Tensor, None, None]:
    """The rows of groups as batches.

    Args:
        groups: the rows.
        skip: how many rows of the first group are left out.
        batch_size: rows in a batch, but in an epoch's last one.
        left: rows of the first epoch that are to come.
        of_epoch: rows of each further one.
    """
    parts: list[torch.Tensor] = []
    missing = min(batch_size, left)
    for group in groups:
        rows, skip = group[skip:], 0
        while len(rows):
            parts.append(rows[:missing])
            rows = rows[missing:]
            missing, left = missing - len(parts[-1]), left - len(parts[-1])
            if not missing:
                yield parts[0] if len(parts) == 1 else torch.cat(parts)
                parts.clear()
                left = left or of_epoch
                missing = min(batch_size, left)
        del group, rows  # before the next one is read, so that its memory is used again


class _Rows:
    """The rows of an activation across all shards: tokens, or examples."""

    def __init__(self, stored: Stored, by_token: bool) -> None:
        entry = stored.entry
        self._stored, self.name, self.dtype = stored, entry.name, stored.dtype
        self._is_flat = by_token and entry.axis == "example"
        n_tokens = entry.shape[0] if self._is_flat else 1
        self.shape = entry.shape[1:] if self._is_flat else entry.shape
        self.of_shards = [n * n_tokens for n in stored.rows_of_shards()]
        self.count = sum(self.of_shards)
        self.bytes = max(1, entry.row_bytes // n_tokens)

    def mapped(self, shard: int) -> torch.Tensor:
        """Those of a shard, in words."""
        rows = self._stored.of_shard(shard)
        return _in_words(rows.flatten(0, 1) if self._is_flat else rows)


def _in_words(rows: torch.Tensor) -> torch.Tensor:
    """Rows as `[rows, words]` of eight bytes, which are copied fastest; else as their bytes."""
    flat = rows.reshape(len(rows), -1)
    is_whole = not (flat[:1].nbytes % 8 or flat.storage_offset() * flat.itemsize % 8)
    return flat.view(torch.int64 if is_whole else torch.uint8)


class _Groups:
    """The blocks of each group, and the order in which a group's rows are handed out."""

    def __init__(
        self, rows: _Rows, block_rows: int, group_rows: int, shuffle: bool, seed: int
    ) -> None:
        self._rows, self._group_rows = rows, group_rows
        self._shuffle, self._seed = shuffle, seed
        self._blocks = torch.tensor(
            [
                (shard, start, min(block_rows, count - start))
                for shard, count in enumerate(rows.of_shards)
                for start in range(0, count, block_rows)
            ],
            device="cpu",
        )
        # A block is in the group in which its last row is.
        largest = min(group_rows + block_rows - 1, rows.count)
        self._memory = Memory(largest * rows.bytes)
        self._mapped: dict[int, torch.Tensor] = {}

    def _of(self, epoch: int) -> tuple[torch.Tensor, ...]:
        """The blocks of each group of an epoch: (shard, first row, rows) of each block."""
        blocks = self._blocks
        if self._shuffle:
            blocks = blocks[self._permutation(len(blocks), epoch, -1)]
        group = (blocks[:, 2].cumsum(0) - 1) // self._group_rows
        return blocks.split(group.unique_consecutive(return_counts=True)[1].tolist())

    def find(self, epoch: int, row: int) -> tuple[int, int]:
        """In which group a row is that is handed out as the n-th of an epoch, and where in it."""
        sizes = [int(blocks[:, 2].sum()) for blocks in self._of(epoch)]
        number = 0
        while number < len(sizes) and row >= sizes[number]:
            row -= sizes[number]
            number += 1
        return number, row

    def read(self, epoch: int, first: int, epochs: int | None) -> Iterator[torch.Tensor]:
        """The rows of one group after the other, in the order in which they are handed out."""
        while epochs is None or epoch < epochs:
            for number, blocks in enumerate(self._of(epoch)):
                if number >= first:
                    size = int(blocks[:, 2].sum())
                    places = self._permutation(size, epoch, number) if self._shuffle else None
                    yield self._read(blocks.tolist(), size, places)
            epoch, first = epoch + 1, 0

    def _read(self, blocks: Any, size: int, places: torch.Tensor | None) -> torch.Tensor:
        """The rows of some blocks, each at its place; None leaves them as they lie."""
        n_bytes = size * self._rows.bytes
        out = self._memory.lend()[:n_bytes].view(self._rows.dtype).view(size, *self._rows.shape)
        words, in_bytes = _in_words(out), out.view(size, -1).view(torch.uint8)
        at = 0
        for shard, start, count in sorted(blocks):
            if shard not in self._mapped:
                self._mapped[shard] = self._rows.mapped(shard)
            rows = self._mapped[shard][start : start + count]
            to = words if rows.dtype == words.dtype else in_bytes
            if places is None:
                to[at : at + count] = rows
            else:
                to.index_copy_(0, places[at : at + count], rows)
            at += count
        return out

    def _permutation(self, count: int, epoch: int, group: int) -> torch.Tensor:
        """One that is the same wherever it is drawn, so that others need not be drawn before."""
        drawn_from = hashlib.sha256(f"{self._seed} {epoch} {group}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(drawn_from[:8], "big"))
        return torch.randperm(count, generator=generator, device="cpu")


class Memory:
    """Pieces of memory that are used again when no tensor is in them any more."""

    def __init__(self, n_bytes: int) -> None:
        self._n_bytes = n_bytes
        self._free: deque[np.ndarray] = deque()

    def lend(self) -> torch.Tensor:
        """One, as bytes; its tensors may be changed."""
        piece = self._free.pop() if self._free else np.empty(self._n_bytes, np.uint8)
        # A tensor of numpy's holds the array that it was made of, so this view of the piece ends
        # when the last tensor in it does.
        lent = piece[:]
        weakref.finalize(lent, self._free.append, piece).atexit = False
        return torch.from_numpy(lent)

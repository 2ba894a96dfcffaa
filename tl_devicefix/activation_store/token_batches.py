"""Batches of tokens' activations in a shuffled order, for training on them.

A block is consecutive rows on disk. All blocks are shuffled and split into groups:

    disk    [b0 b1 b2 b3 b4 b5 ...]        blocks of 256 KiB, in order
    order   [b4 b0 b9 | b2 b7 b1 | ...]    groups of shuffled blocks
    memory  group 1: its rows, shuffled    returned, while a thread reads group 2

Memory is bounded, disks read large pieces, and each row is copied once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from tl_devicefix.activation_store.format import Stored
from tl_devicefix.placement.devices import DeviceLike

BYTES_OF_BLOCK = 2**18  # smaller reads are slower


class TokenBatches(Iterator[torch.Tensor]):
    """Batches `[batch_size, ...]` of one activation's rows, each row once an epoch.

    With `shuffle=True`, rows are shuffled in groups, as large as half of the largest shard. A group
    has blocks of 256 KiB from anywhere on disk, and its rows are in a random order. You get a
    permutation of all rows, but not every permutation is equally likely. The same seed gives the
    same order, and each epoch has another. An epoch's last batch has the remaining rows.

    A thread reads ahead, so up to three groups are in memory. A batch is a view that keeps its
    whole group alive: clone it if you keep it. A process that you fork later lacks the thread, and
    would wait forever: make new batches there. `state_dict()` has the position, and
    `load_state_dict` continues there.
    """

    def __init__(
        self, groups: Groups, batch_size: int, device: DeviceLike, epochs: int | None
    ) -> None:
        for name, value in (("batch_size", batch_size), ("epochs", epochs)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be 1 or more, but is {value}")
        self._groups, self._batch_size, self._epochs = groups, batch_size, epochs
        self._device = device
        # Round up: an epoch's last batch may be smaller.
        self._batches_per_epoch = -(-groups.n_rows // batch_size)
        self._n_returned = 0
        self._iterator: Generator[torch.Tensor, None, None] | None = None

    def __len__(self) -> int:
        """Return the number of batches in all epochs.

        Raises:
            TypeError: if `epochs` is None.
        """
        if self._epochs is None:
            raise TypeError("batches with epochs=None have no length: pass a number of epochs")
        return self._epochs * self._batches_per_epoch

    def __next__(self) -> torch.Tensor:
        is_over = self._epochs is not None and self._n_returned >= len(self)
        if is_over or not self._groups.n_rows:
            self.close()
            raise StopIteration
        try:
            if self._iterator is None:
                self._iterator = self._from_position()
            batch = next(self._iterator).to(self._device)
        except BaseException:
            self.close()  # the next call has to read this batch again
            raise
        self._n_returned += 1
        return batch

    def _from_position(self) -> Generator[torch.Tensor, None, None]:
        epoch, batch = divmod(self._n_returned, self._batches_per_epoch)
        n_rows, row = self._groups.n_rows, batch * self._batch_size
        # Use a function, not a method: the thread must not keep this object alive.
        read = _read_ahead(self._groups.read(epoch, row, self._epochs))
        return _batches(read, self._batch_size, n_rows - row, n_rows)

    def state_dict(self) -> dict[str, object]:
        """Return the position, for `load_state_dict` of batches with the same arguments.

        Returns:
            Numbers and strings, which you can save with a training run's checkpoint.
        """
        return {
            "batch_size": self._batch_size,
            "name": self._groups.stored.entry.name,
            "rows": self._groups.n_rows,
            "seed": self._groups.seed,
            "shuffle": self._groups.shuffle,
            "batches": self._n_returned,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the position of other batches.

        Args:
            state: the result of their `state_dict()`.

        Raises:
            ValueError: if those were of another activation, or in another order.
        """
        for name, own in self.state_dict().items():
            if name != "batches" and state.get(name) != own:
                raise ValueError(
                    f"the state has {name}={state.get(name)!r}, but these batches have {own!r}: "
                    "call activations() with the arguments of the batches that saved the state"
                )
        self.close()
        self._n_returned = state["batches"]

    def close(self) -> None:
        """Stop the thread that reads, and free its memory."""
        if self._iterator is not None:
            self._iterator.close()
            self._iterator = None


def _read_ahead(groups: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the groups, while a thread reads the next one."""
    with ThreadPoolExecutor(1, thread_name_prefix="activations reader") as reader:
        future = reader.submit(next, groups, None)  # `next` reads the disk
        while (group := future.result()) is not None:
            future = reader.submit(next, groups, None)
            yield group


def _batches(
    groups: Iterator[torch.Tensor], batch_size: int, left: int, epoch_rows: int
) -> Generator[torch.Tensor, None, None]:
    """Cut groups into batches: `left` rows in the first epoch, then `epoch_rows` rows each."""
    # groups   [a a a a a][b b b b b][c ...     a batch may have rows of several groups,
    # batches  [a a a][a a b][b b b][b c ...    but not of two epochs
    parts: list[torch.Tensor] = []
    missing = min(batch_size, left)
    for rows in groups:
        while len(rows):
            parts.append(rows[:missing])
            rows = rows[missing:]
            missing, left = missing - len(parts[-1]), left - len(parts[-1])
            if not missing:
                yield parts[0] if len(parts) == 1 else torch.cat(parts)
                parts.clear()
                left = left or epoch_rows
                missing = min(batch_size, left)


class Groups:
    """The rows of an activation in all shards, in groups of blocks, of which three are in memory.

    A row is an example or, if `by_token` says that stored examples are `[pos, ...]`, a token.
    """

    def __init__(
        self, stored: Stored, by_token: bool, group_bytes: int, shuffle: bool, seed: int
    ) -> None:
        entry = stored.entry
        self.stored, self.shuffle, self.seed = stored, shuffle, seed
        self._is_flat = by_token and entry.axis == "example"
        n_tokens = entry.shape[0] if self._is_flat else 1
        self._shape = entry.shape[1:] if self._is_flat else entry.shape
        self._row_bytes = max(1, entry.row_bytes // n_tokens)
        self._group_rows = max(1, group_bytes // self._row_bytes)
        rows_by_shard = [n * n_tokens for n in stored.rows_of_shards()]
        self.n_rows = sum(rows_by_shard)
        block_rows = max(1, BYTES_OF_BLOCK // self._row_bytes)
        self._blocks = torch.tensor(
            [
                (shard, start, min(block_rows, count - start))
                for shard, count in enumerate(rows_by_shard)
                for start in range(0, count, block_rows)
            ],
            device="cpu",
        )
        self._mapped: dict[int, np.ndarray] = {}

    def _blocks_by_group(self, epoch: int) -> tuple[torch.Tensor, ...]:
        """Return the blocks of each group of an epoch, as (shard, first row, number of rows)."""
        blocks = self._blocks  # [blocks, 3]
        if self.shuffle:
            blocks = blocks[self._permutation(len(blocks), epoch, -1)]
        # A block belongs to the group in which its last row falls.
        group = (blocks[:, 2].cumsum(0) - 1) // self._group_rows
        return blocks.split(group.unique_consecutive(return_counts=True)[1].tolist())

    def read(self, epoch: int, skip: int, epochs: int | None) -> Iterator[torch.Tensor]:
        """Yield the rows of each group, without the first `skip` of the first epoch."""
        while epochs is None or epoch < epochs:
            for number, blocks in enumerate(self._blocks_by_group(epoch)):
                size = int(blocks[:, 2].sum())
                if skip < size:
                    places = self._permutation(size, epoch, number) if self.shuffle else None
                    yield self._read(blocks.tolist(), size, places)[skip:]
                skip = max(0, skip - size)
            epoch += 1

    def _read(
        self, blocks: list[list[int]], size: int, places: torch.Tensor | None
    ) -> torch.Tensor:
        """Read the rows of some blocks, each to its place; without places, in the order on disk."""
        # [rows, bytes]; numpy asks for huge pages
        out, at = np.empty((size, self._row_bytes), np.uint8), 0
        for shard, start, count in sorted(blocks):  # in the order on disk
            if shard not in self._mapped:
                self._mapped[shard] = self._shard_bytes(shard)
            where = slice(at, at + count) if places is None else places[at : at + count].numpy()
            out[where] = self._mapped[shard][start : start + count]
            at += count
        return torch.from_numpy(out).view(self.stored.dtype).view(size, *self._shape)

    def _shard_bytes(self, shard: int) -> np.ndarray:
        """Return a shard's rows as bytes [rows, bytes], which numpy copies fastest."""
        rows = self.stored.map_shard(shard)  # [examples, pos, ...], or [rows, ...]
        rows = rows.flatten(0, 1) if self._is_flat else rows  # [rows, ...]
        return rows.reshape(len(rows), -1).view(torch.uint8).numpy()

    def _permutation(self, count: int, epoch: int, group: int) -> torch.Tensor:
        """Draw a permutation that depends on seed, epoch and group alone."""
        # Groups that `load_state_dict` skips need no draws.
        drawn_from = hashlib.sha256(f"{self.seed} {epoch} {group}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(drawn_from[:8], "big"))
        return torch.randperm(count, generator=generator, device="cpu")

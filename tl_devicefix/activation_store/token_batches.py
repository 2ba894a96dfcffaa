"""Batches of tokens' activations in a shuffled order, for training on them.

The order is made of blocks: rows that follow each other on disk. All blocks are shuffled. A group
of them is read at a time, each row to the place in memory that the order gives it, while the group
before it is handed out. So memory is bounded, what is read is read in pieces of a size that disks
are good at, and each row is copied once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch

from tl_devicefix.activation_store.reading_ahead import Reader
from tl_devicefix.activation_store.stored import Stored
from tl_devicefix.activation_store.token_order import Plan
from tl_devicefix.activation_store.token_rows import Rows

BYTES_OF_BLOCK = 2**18
Shuffle = bool | Literal["exact"]


class TokenBatches(Iterator[torch.Tensor]):
    """Batches `[batch_size, ...]` of one activation's rows, each row once an epoch.

    `shuffle=True` promises that: a true permutation of all rows, but not any permutation alike.
    Rows come in groups of half a shard's bytes, a group is blocks of 256 KiB from anywhere in the
    harvest, and within it any order is as likely as any other. `shuffle="exact"` is a permutation
    drawn from all alike: each row is read by itself, which is slower from a disk, and the order
    takes some 50 bytes of memory a row. The order is the same for the same seed, and another in
    each epoch. An epoch's last batch has what is left.

    A thread reads ahead, into memory that is used again when nobody has a batch of it any more:
    three groups of it, if batches are let go of. A batch that is kept keeps its group; clone it.
    `state_dict()` says how many batches were handed out, and `load_state_dict` goes on from there.

    Args:
        stored: the activation. Its rows are tokens, if it has an axis for them.
        batch_size: rows in a batch.
        shuffle: False for the order on disk, True, or "exact".
        seed: of the order.
        device: where batches are brought; by default they are on the CPU.
        epochs: how often all rows are handed out; None for ever.
        group_bytes: of a group, of which three are in memory.
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
        if shuffle not in (True, False, "exact"):
            raise ValueError(f'shuffle must be True, False or "exact", but is {shuffle!r}')
        for name, value in (("batch_size", batch_size), ("epochs", epochs)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be 1 or more, but is {value!r}")
        self._rows = Rows(stored, by_token)
        self._batch_size, self._seed, self._epochs = batch_size, seed, epochs
        self._shuffle, self._device = shuffle, device
        self._group_rows = max(1, group_bytes // self._rows.bytes)
        self._given = 0
        self._reader: Reader | None = None
        self._group: torch.Tensor | None = None
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
        if self._reader is not None and not self._reader.is_of_this_process:
            self.close()
        if not self._rows.count or (self._epochs is not None and self._given >= len(self)):
            self.close()
            raise StopIteration
        try:
            batch = self._next_batch()
        except BaseException:
            self.close()  # so that the next try reads this batch again, from its first row
            raise
        self._given += 1
        return batch

    def _next_batch(self) -> torch.Tensor:
        size = min(
            self._batch_size,
            self._rows.count - self._given % self._batches_of_epoch * self._batch_size,
        )
        parts: list[torch.Tensor] = []
        while size:
            parts.append(self._take(size))
            size -= len(parts[-1])
        batch = parts[0] if len(parts) == 1 else torch.cat(parts)
        return batch if self._device is None else batch.to(self._device)

    def _take(self, most: int) -> torch.Tensor:
        """The next rows of what was read, as many as are wanted and there."""
        if self._group is None:
            if self._reader is None:
                self._reader = self._reading_on()
            self._group = self._reader.next()
        taken = self._group[self._at : self._at + most]
        self._at += len(taken)
        if self._at >= len(self._group):
            self._group, self._at = None, 0
        return taken

    def _reading_on(self) -> Reader:
        """A thread that reads from the next batch on."""
        epoch, batch = divmod(self._given, self._batches_of_epoch)
        self._at = batch * self._batch_size
        blocks = self._rows.blocks(self._rows_of_block())
        plan = Plan(blocks, self._group_rows, bool(self._shuffle), self._seed)
        first, self._at = plan.find(epoch, self._at)
        return Reader(self._rows, plan, epoch, first, self._epochs)

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

    def state_dict(self) -> dict[str, Any]:
        """How far it is, for `load_state_dict` of batches with the same arguments.

        Returns:
            Plain numbers and texts, which you can save beside a training run.
        """
        return {
            "batches": self._given,
            "of": self._rows.name,
            "rows": self._rows.count,
            "shuffle": self._shuffle,
            "seed": self._seed,
            "batch_size": self._batch_size,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where others were.

        Args:
            state: which their `state_dict()` returned.

        Raises:
            ValueError: if those were of another activation, or in another order.
        """
        if missing := self.state_dict().keys() - state.keys():
            raise ValueError(f"the state has no {min(missing)}: give what state_dict() returned")
        for name, own in self.state_dict().items():
            if name != "batches" and state[name] != own:
                raise ValueError(
                    f"these batches have {name}={own}, but those that are gone on with had "
                    f"{state[name]}"
                )
        self.close()
        self._given = state["batches"]

    def close(self) -> None:
        """End the thread that reads, and let go of what it has read."""
        if self._reader is not None:
            self._reader.close()
        self._reader, self._group, self._at = None, None, 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reader": None, "_group": None, "_at": 0}

    def __del__(self) -> None:
        if getattr(self, "_reader", None) is not None:
            self.close()

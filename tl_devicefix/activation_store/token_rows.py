"""The rows of an activation across all shards: its tokens, or examples of what was reduced."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import numpy as np
import torch

from tl_devicefix.activation_store.stored import Stored


class Rows:
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

    def read(self, blocks: torch.Tensor, places: torch.Tensor | None, memory: Memory) -> Any:
        """The rows of some blocks.

        Args:
            blocks: which.
            places: where each row goes, of the rows as they lie; None to leave them so.
            memory: where they are read to.
        """
        size = int(blocks[:, 2].sum())
        out = memory.lend()[: size * self.bytes].view(self.dtype).view(size, *self.shape)
        words, in_bytes = _in_words(out), out.view(size, -1).view(torch.uint8)
        at = 0
        for shard, start, count in sorted(blocks.tolist()):
            rows = self._of_shard(shard)[start : start + count]
            to = words if rows.dtype == words.dtype else in_bytes
            if places is None:
                to[at : at + count] = rows
            else:
                to.index_copy_(0, places[at : at + count], rows)
            at += count
        return out

    def _of_shard(self, shard: int) -> torch.Tensor:
        if shard not in self._mapped:
            rows = self._stored.of_shard(shard)
            self._mapped[shard] = _in_words(rows.flatten(0, 1) if self._flat else rows)
        return self._mapped[shard]


def _in_words(rows: torch.Tensor) -> torch.Tensor:
    """Rows as `[rows, words]` of eight bytes, which are copied fastest; else as their bytes."""
    flat = rows.reshape(len(rows), -1)
    is_whole = not (flat[:1].nbytes % 8 or flat.storage_offset() * flat.itemsize % 8)
    return flat.view(torch.int64 if is_whole else torch.uint8)


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

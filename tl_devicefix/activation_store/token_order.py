"""The order in which rows are handed out: the same for the same seed, whoever asks."""

from __future__ import annotations

import hashlib

import torch


class Plan:
    """Which blocks are in which group, and in what order a group's rows are handed out.

    Args:
        blocks: all, `[blocks, 3]`: shard, first row, rows.
        group_rows: of a group.
        shuffle: whether the order is another than on disk.
        seed: of the order.
    """

    def __init__(self, blocks: torch.Tensor, group_rows: int, shuffle: bool, seed: int) -> None:
        self._blocks, self._group_rows = blocks, group_rows
        self._shuffle, self._seed = shuffle, seed
        # A block is in the group in which its last row is.
        largest_block = int(blocks[:, 2].max()) if len(blocks) else 0
        self.largest_group = group_rows + largest_block - 1
        self._epoch = -1
        self._groups: tuple[torch.Tensor, ...] = ()

    def groups(self, epoch: int) -> tuple[torch.Tensor, ...]:
        """The blocks of each group of an epoch."""
        if epoch != self._epoch:
            blocks = self._blocks
            if self._shuffle:
                blocks = blocks[self._permutation(len(blocks), epoch, -1)]
            group = (blocks[:, 2].cumsum(0) - 1) // self._group_rows
            sizes = group.unique_consecutive(return_counts=True)[1]
            self._groups, self._epoch = blocks.split(sizes.tolist()), epoch
        return self._groups

    def places(self, epoch: int, group: int) -> torch.Tensor | None:
        """Where each row of a group goes; None to leave them as they lie."""
        if not self._shuffle:
            return None
        n_rows = int(self.groups(epoch)[group][:, 2].sum())
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

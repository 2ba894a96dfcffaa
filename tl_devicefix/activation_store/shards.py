"""Tensors on disk, of which only those rows are read that are asked for."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from tl_devicefix.activation_store.format import TOKEN_MASK, Entry, Index


class Stored:
    """The activations of one hook point, or tokens or masks, on disk.

    Index it by examples: `stored[3]`, `stored[3:7]` or `stored[[5, 1, 900]]`. You get a tensor on
    the CPU, `[examples, ...]`. If `token_mask` left tokens out, you get `[tokens, ...]`: the saved
    tokens of one example after the other.
    """

    def __init__(self, directory: Path, index: Index, entry: Entry) -> None:
        self._directory, self._index, self.entry = directory, index, entry
        self._ends: dict[int, list[int]] = {}

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its tensors."""
        return self.entry.torch_dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of `stored[:]`."""
        return (sum(self.rows_of_shards()), *self.entry.shape)

    def __len__(self) -> int:
        return self._index.n_examples

    def __repr__(self) -> str:
        return f"{self.entry.name}: {self.entry.dtype} {list(self.shape)}"

    def __getitem__(self, index: Any) -> torch.Tensor:
        numbers = self.numbers(index)
        if isinstance(numbers, int):
            (rows,) = self._pieces([numbers])
            return rows if self.entry.axis == "token" else rows[0]
        pieces = self._pieces(numbers)
        empty = torch.empty((0, *self.entry.shape), dtype=self.dtype, device="cpu")
        return pieces[0] if len(pieces) == 1 else torch.cat([empty, *pieces])

    def numbers(self, index: Any) -> int | Sequence[int]:
        """The number of an example from 0 on, or those of several.

        Raises:
            TypeError: if `index` is no number, slice or list of numbers.
            IndexError: if there is no such example.
        """
        if hasattr(index, "tolist"):
            index = index.tolist()
        examples = range(len(self))
        if isinstance(index, slice):
            return examples[index]
        for number in index if isinstance(index, list) else [index]:
            if isinstance(number, bool) or not isinstance(number, int):
                raise TypeError(
                    f"{self.entry.name} is indexed by examples only, which are numbers, slices "
                    f"and lists of numbers, not by {type(number).__name__}: saved[name][3:7][:, 0]"
                )
            if not -len(self) <= number < len(self):
                raise IndexError(f"there is no example {number} among {len(self)}")
        return [examples[n] for n in index] if isinstance(index, list) else examples[index]

    def of_shard(self, number: int) -> torch.Tensor:
        """All rows that a shard has, mapped: parts are read as they are used.

        Each call maps the file anew, so that changes to the tensor stay in it.
        """
        shard, entry = self._index.shards[number], self.entry
        path = self._directory / shard.file
        verify = f"`python -m tl_devicefix activations verify {self._directory}` checks all shards"
        try:
            with safe_open(str(path), framework="pt", device="cpu") as file:
                examples = (file.metadata() or {}).get("examples")
                rows: torch.Tensor = file.get_tensor(entry.name)
            expected = shard.examples, entry.torch_dtype, (shard.rows(entry), *entry.shape)
            if (examples, rows.dtype, rows.shape) != expected:
                raise SafetensorError("it is not the one in the index")
        except FileNotFoundError:
            raise FileNotFoundError(f"{path} is missing: {verify}") from None
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged ({error}): {verify}") from error
        return rows

    def rows_of_shards(self) -> list[int]:
        """How many rows each shard has."""
        return [shard.rows(self.entry) for shard in self._index.shards]

    def _pieces(self, numbers: Sequence[int]) -> list[torch.Tensor]:
        """The rows of some examples, in order; of examples that follow each other, at once."""
        pieces: list[torch.Tensor] = []
        mapped: dict[int, torch.Tensor] = {}
        at = 0
        while at < len(numbers):
            start = numbers[at]
            shards = self._index.shards
            number = bisect.bisect_right(shards, start, key=lambda shard: shard.start) - 1
            shard, count = shards[number], 1
            while at + count < len(numbers) and numbers[at + count] == start + count < shard.stop:
                count += 1
            if number not in mapped:
                mapped[number] = self.of_shard(number)
            first = start - shard.start
            pieces.append(mapped[number][self._rows(number, first, first + count)])
            at += count
        return pieces

    def _rows(self, shard: int, start: int, stop: int) -> slice:
        """The rows that a shard has of some of its examples."""
        if self.entry.axis == "example":
            return slice(start, stop)
        if shard not in self._ends:
            (mask,) = (entry for entry in self._index.entries if entry.name == TOKEN_MASK)
            saved = Stored(self._directory, self._index, mask).of_shard(shard)
            self._ends[shard] = [0, *saved.sum(1).cumsum(0).tolist()]
        return slice(self._ends[shard][start], self._ends[shard][stop])

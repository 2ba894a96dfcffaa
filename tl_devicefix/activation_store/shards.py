"""Tensors on disk, of which only those rows are read that are asked for."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from tl_devicefix.activation_store.format import TOKEN_MASK, Entry, Index, has_its_header


class Shards:
    """The shards in a directory, each of which is compared with the index when it is first read."""

    def __init__(self, directory: Path, index: Index) -> None:
        self._directory, self.index = directory, index
        self._compared: set[int] = set()

    def mapped(self, number: int, name: str) -> torch.Tensor:
        """A tensor of a shard, mapped: parts of it are read as they are used.

        Each call maps the file anew, so that changes to the tensor stay in it.

        Raises:
            FileNotFoundError: if the file is missing.
            ValueError: if it is cut off, or is another.
        """
        shard = self.index.shards[number]
        path = self._directory / shard.file
        verify = f"`python -m tl_devicefix activations verify {self._directory}` checks all shards"
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing: {verify}")
        if number not in self._compared:
            if not has_its_header(path, self.index, shard):
                raise ValueError(
                    f"{path} is damaged (it does not begin as it was written): {verify}"
                )
            self._compared.add(number)
        try:
            with safe_open(str(path), framework="pt", device="cpu") as file:
                return file.get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged ({error}): {verify}") from error


class Stored:
    """The activations of one hook point, or tokens or masks, on disk.

    `stored[3]` is the fourth example's, `stored[3:7]` and `stored[[5, 1, 900]]` are those of
    several, in that order: a tensor on the CPU, `[examples, ...]`; or `[tokens, ...]` of the saved
    tokens, one example's after the other's, where `token_mask` left some out.
    """

    def __init__(self, shards: Shards, entry: Entry) -> None:
        self._shards, self._index, self.entry = shards, shards.index, entry
        self._starts = [shard.start for shard in self._index.shards]
        self._ends: dict[int, list[int]] = {}

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its tensors."""
        return self.entry.torch_dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of `stored[:]`."""
        if self.entry.axis == "shared":
            return self.entry.shape
        return (sum(self.rows_of_shards()), *self.entry.shape)

    def __len__(self) -> int:
        return self._index.n_examples

    def __repr__(self) -> str:
        return f"{self.entry.name}: {self.entry.dtype} {list(self.shape)}"

    def __getitem__(self, which: Any) -> torch.Tensor:
        if self.entry.axis == "shared":
            raise TypeError(
                f"{self.entry.name} has no rows of examples: it is one tensor for all of them, "
                "which h.cache has"
            )
        numbers = self.numbers(which)
        if isinstance(numbers, int):
            rows = self._range(numbers, numbers + 1)
            return rows if self.entry.axis == "token" else rows[0]
        if isinstance(numbers, range) and numbers.step == 1:
            return self._range(numbers.start, max(numbers.start, numbers.stop))
        return torch.cat([self._empty(), *self._rows_of_each(numbers)])

    def numbers(self, which: Any) -> int | Sequence[int]:
        """The number of an example from 0 on, or those of several.

        Raises:
            TypeError: if `which` is no number, slice or list of numbers.
            IndexError: if there is no such example.
        """
        if hasattr(which, "tolist"):
            which = which.tolist()
        examples = range(len(self))
        if isinstance(which, slice):
            return examples[which]
        for number in which if isinstance(which, list) else [which]:
            if isinstance(number, bool) or not isinstance(number, int):
                raise TypeError(
                    f"{self.entry.name} is indexed by examples only, which are numbers, slices "
                    f"and lists of numbers, not by {type(number).__name__}: h[name][3:7][:, 0]"
                )
            if not -len(self) <= number < len(self):
                raise IndexError(f"there is no example {number} among {len(self)}")
        return [examples[n] for n in which] if isinstance(which, list) else examples[which]

    def of_shard(self, number: int) -> torch.Tensor:
        """All rows that a shard has, mapped."""
        return self._shards.mapped(number, self.entry.same_as or self.entry.name)

    def rows_of_shards(self) -> list[int]:
        """How many rows each shard has."""
        by_token = self.entry.axis == "token"
        return [s.tokens if by_token else s.stop - s.start for s in self._index.shards]

    def _rows(self, shard: int, start: int, stop: int) -> slice:
        """The rows that a shard has of some of its examples."""
        first = self._starts[shard]
        if self.entry.axis != "token":
            return slice(start - first, stop - first)
        if shard not in self._ends:
            saved = self._shards.mapped(shard, TOKEN_MASK)
            self._ends[shard] = [0, *saved.sum(1).cumsum(0).tolist()]
        return slice(self._ends[shard][start - first], self._ends[shard][stop - first])

    def _range(self, start: int, stop: int) -> torch.Tensor:
        parts = []
        while start < stop:
            shard = bisect.bisect_right(self._starts, start) - 1
            end = min(stop, self._index.shards[shard].stop)
            parts.append(self.of_shard(shard)[self._rows(shard, start, end)])
            start = end
        return parts[0] if len(parts) == 1 else torch.cat([self._empty(), *parts])

    def _rows_of_each(self, numbers: Sequence[int]) -> Iterator[torch.Tensor]:
        mapped: dict[int, torch.Tensor] = {}
        for number in numbers:
            shard = bisect.bisect_right(self._starts, number) - 1
            if shard not in mapped:
                mapped[shard] = self.of_shard(shard)
            yield mapped[shard][self._rows(shard, number, number + 1)]

    def _empty(self) -> torch.Tensor:
        return torch.empty((0, *self.entry.shape), dtype=self.dtype, device="cpu")

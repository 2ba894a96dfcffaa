"""What is stored under one name, of which only that is read which is asked for."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from tl_devicefix.activation_store.format import KEPT, Entry, Index, has_its_header


class Shards:
    """The shards in a directory, each of which is compared with the index when it is first read.

    Args:
        directory: of the harvest.
        index: what it has.
    """

    def __init__(self, directory: Path, index: Index) -> None:
        self._directory, self.index = directory, index
        self._compared: set[int] = set()

    def mapped(self, number: int, name: str) -> torch.Tensor:
        """A tensor of a shard, mapped: what of it is used is read then.

        Each call maps the file anew, so that who changes the tensor changes it for himself only.

        Raises:
            FileNotFoundError: if the file is not there.
            ValueError: if it is cut off, or is another.
        """
        shard = self.index.shards[number]
        path = self._directory / shard.file
        verify = f"`python -m tl_devicefix activations verify {self._directory}` says what else is"
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

    `stored[3]` is what an example has, `stored[3:7]` and `stored[[5, 1, 900]]` are those of
    several, in that order: a tensor on the CPU, `[examples, ...]`; or `[tokens, ...]` of the tokens
    that were kept, one example's after the other's, where `token_mask` left some out.

    Args:
        shards: of the harvest.
        entry: which.
    """

    def __init__(self, shards: Shards, entry: Entry) -> None:
        self._shards, self._index, self.entry = shards, shards.index, entry
        self._name = entry.same_as or entry.name
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
        return (self.n_rows, *self.entry.shape)

    @property
    def n_rows(self) -> int:
        """How many rows there are: examples, or tokens where `token_mask` left some out."""
        if self.entry.axis == "token":
            return sum(shard.tokens for shard in self._index.shards)
        return self._index.n_examples

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
        if isinstance(which, slice):
            start, stop, step = which.indices(len(self))
            if step == 1:
                return self._range(start, max(start, stop))
            return self._picked(range(start, stop, step))
        if isinstance(which, tuple):  # which would be another axis of a tensor
            raise TypeError(
                f"{self.entry.name} is indexed by examples only: h[name][3:7][:, 0], not "
                "h[name][3:7, 0]"
            )
        if isinstance(which, (Sequence, torch.Tensor)) or hasattr(which, "__array__"):
            # An index of one number, as a tensor or of numpy, has no length.
            listed = which.tolist() if hasattr(which, "tolist") else list(which)
            if isinstance(listed, list):
                return self._picked([self._checked(each) for each in listed])
            which = listed
        number = self._checked(which)
        rows = self._range(number, number + 1)
        return rows if self.entry.axis == "token" else rows[0]

    def of_shard(self, number: int) -> torch.Tensor:
        """All rows that a shard has, mapped."""
        return self._shards.mapped(number, self._name)

    def rows_of_shards(self) -> list[int]:
        """How many rows each shard has."""
        by_token = self.entry.axis == "token"
        return [s.tokens if by_token else s.stop - s.start for s in self._index.shards]

    def _checked(self, number: Any) -> int:
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(
                f"{self.entry.name} is indexed by numbers of examples, slices and lists of numbers,"
                f" not by {type(number).__name__}"
            )
        if not -len(self) <= number < len(self):
            raise IndexError(f"there is no example {number} among {len(self)}")
        return number % len(self)

    def _shard_of(self, number: int) -> int:
        return bisect.bisect_right(self._starts, number) - 1

    def _rows(self, shard: int, start: int, stop: int) -> slice:
        """The rows that a shard has of some of its examples."""
        first = self._starts[shard]
        if self.entry.axis != "token":
            return slice(start - first, stop - first)
        if shard not in self._ends:
            kept = self._shards.mapped(shard, KEPT)
            self._ends[shard] = [0, *kept.sum(1).cumsum(0).tolist()]
        return slice(self._ends[shard][start - first], self._ends[shard][stop - first])

    def _range(self, start: int, stop: int) -> torch.Tensor:
        parts = []
        while start < stop:
            shard = self._shard_of(start)
            end = min(stop, self._index.shards[shard].stop)
            parts.append(self.of_shard(shard)[self._rows(shard, start, end)])
            start = end
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts) if parts else self._empty(0)

    def _picked(self, numbers: Sequence[int]) -> torch.Tensor:
        if self.entry.axis == "token":
            return torch.cat([self._empty(0), *(self._range(i, i + 1) for i in numbers)])
        out = self._empty(len(numbers))
        of_shard: dict[int, list[int]] = {}
        for place, number in enumerate(numbers):
            of_shard.setdefault(self._shard_of(number), []).append(place)
        for shard, places in of_shard.items():
            rows = [numbers[place] - self._starts[shard] for place in places]
            out[places] = self.of_shard(shard)[rows]
        return out

    def _empty(self, n_rows: int) -> torch.Tensor:
        return torch.empty((n_rows, *self.entry.shape), dtype=self.dtype, device="cpu")

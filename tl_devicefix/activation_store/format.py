"""The files on disk: an `index.json`, and shards, which are safetensors files of whole examples.

A file gets its name once it is complete and synced; a shard is added to the index after that. Files
that the index lacks are not read.
"""

from __future__ import annotations

import bisect
import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from xxhash import xxh3_128

VERSION = 4
INDEX = "index.json"
LOCK = ".tl_devicefix.lock"
TEMPORARY = ".part"  # the suffix of files that are not complete

TOKENS, MASK, TOKEN_MASK = "tokens", "attention_mask", "token_mask"  # beside activations
NOT_BY_TOKEN = ("hook_pattern", "hook_attn_scores")  # [batch, head, query_pos, key_pos]

Axis = Literal["example", "token"]
Pieces = Mapping[str, Sequence[torch.Tensor]]
"""Name -> tensors on the CPU that follow each other along their first axis."""
Examples = int | slice | Sequence[int] | torch.Tensor
"""Numbers of examples; -1 is the last one."""

# torch's name of a dtype -> safetensors's name (safetensors's own table is private).
CODES = (
    {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
    | {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "bool": "BOOL"}
    | {"int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8"}
)


@dataclass(frozen=True)
class StoredTensor:
    """The tensors that are stored under one name."""

    name: str  # a cache's key
    dtype: str  # torch's name, such as "bfloat16"
    shape: tuple[int, ...]  # the shape of one row
    axis: Axis = "example"  # a row belongs to an example, or to a saved token

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)} by {self.axis}"

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        return getattr(torch, self.dtype)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return torch.Size(self.shape).numel() * self.torch_dtype.itemsize


@dataclass(frozen=True)
class Shard:
    """A file with the examples from `start` to `stop`, exclusive."""

    file: str
    start: int
    stop: int
    tokens: int  # the number of saved tokens: those that `token_mask` selects
    bytes: int
    xxh3_128: str  # a checksum that is fast enough to compute during the write

    def rows(self, entry: StoredTensor) -> int:
        """Return the number of an entry's rows in this shard."""
        return self.tokens if entry.axis == "token" else self.stop - self.start


@dataclass(frozen=True)
class Index:
    """The contents of a directory, as `index.json` lists them.

    Attributes:
        model: the model's name, class, and the config's sizes and `normalization_type`.
        made_by: the versions of the packages that computed and wrote the activations.
        entries: the tokens and masks, then the activations, in the order of a cache.
        examples_per_shard: the number of examples in each shard but the last.
        shards: the shards, in the order of their examples.
        is_complete: True if all examples of the call are here.
        version: the version of this format.
    """

    model: dict[str, object]
    made_by: dict[str, str]
    entries: tuple[StoredTensor, ...]
    examples_per_shard: int
    shards: tuple[Shard, ...] = ()
    is_complete: bool = False
    version: int = VERSION

    @property
    def n_examples(self) -> int:
        """The number of stored examples."""
        return self.shards[-1].stop if self.shards else 0


def shard_name(number: int) -> str:
    """Return the name of a shard's file."""
    return f"shard-{number:05d}.safetensors"


def read_index(directory: Path) -> Index:
    """Read the index of a directory.

    Raises:
        FileNotFoundError: if it has none.
        ValueError: if it has another version of the format.
    """
    try:
        fields = json.loads((directory / INDEX).read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(
            f"there is no {INDEX} in {directory}: give the directory that save_activations wrote to"
        ) from None
    version = fields.get("version") if isinstance(fields, dict) else None
    if version != VERSION:
        raise ValueError(
            f"the activations in {directory} are of version {version} of the format, but this "
            f"tl_devicefix reads version {VERSION}: save them again to another directory"
        )
    entries = [
        StoredTensor(**{**entry, "shape": tuple(entry["shape"])}) for entry in fields["entries"]
    ]
    shards = [Shard(**shard) for shard in fields["shards"]]
    return Index(**{**fields, "entries": tuple(entries), "shards": tuple(shards)})


def write_index(directory: Path, index: Index) -> None:
    """Replace a directory's index."""
    text = json.dumps(asdict(index), indent=1) + "\n"
    write_file(directory / INDEX, lambda file: file.write(text.encode()))


def write_file(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file under a temporary name, sync it, and rename it; if that fails, delete it."""
    part = path.with_name(path.name + TEMPORARY)
    try:
        with part.open("wb") as file:
            write(file)
            file.flush()
            # Sync before the rename: otherwise, a crash may leave an empty file of this name.
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:  # Ctrl-C too: no half-written file may stay
        part.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)  # sync the new name too
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def write_shard(path: Path, pieces: Pieces, start: int, stop: int) -> tuple[int, str]:
    """Write a safetensors file from pieces of tensors, without concatenating them in memory.

    Returns:
        Its size in bytes, and its checksum.
    """
    # As in safetensors, the widest dtypes come first, so that each tensor is aligned.
    by_width = sorted(pieces.items(), key=lambda item: -item[1][0].itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt", "examples": f"{start}:{stop}"}}
    end = 0
    for name, tensors in by_width:
        first, end = end, end + sum(tensor.nbytes for tensor in tensors)
        header[name] = {
            "dtype": CODES[dtype_name(tensors[0].dtype)],
            "shape": [sum(map(len, tensors)), *tensors[0].shape[1:]],
            "data_offsets": [first, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that data begins at a multiple of 8 bytes
    checksum = xxh3_128()

    def write(file: BinaryIO) -> None:
        parts: Iterator[bytes | memoryview] = (  # lazy: `reshape` may copy a tensor
            tensor.reshape(-1).view(torch.uint8).numpy().data
            for _, tensors in by_width
            for tensor in tensors
        )
        for part in chain([struct.pack("<Q", len(text)) + text], parts):
            file.write(part)
            checksum.update(part)

    write_file(path, write)
    return path.stat().st_size, str(checksum.hexdigest())


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name in torch, without "torch."."""
    return str(dtype).removeprefix("torch.")


class Stored:
    """The activations of one hook point, or tokens or masks, on disk.

    Index it by examples. You get a tensor on the CPU: `[...]` from `stored[3]`, `[examples, ...]`
    from `stored[3:7]` or `stored[[5, 1, 900]]`. Activations saved with a `token_mask` are
    `[tokens, ...]`: the saved tokens of each example in turn.
    """

    def __init__(self, directory: Path, index: Index, entry: StoredTensor) -> None:
        self._directory, self._index, self.entry = directory, index, entry
        # Shard -> [0, the row where each example's saved tokens end]; `token_mask` varies them.
        self._ends: dict[int, list[int]] = {}

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of `stored[:]`."""
        return self.entry.torch_dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of `stored[:]`."""
        return (sum(self.rows_of_shards()), *self.entry.shape)

    def __len__(self) -> int:
        return self._index.n_examples

    def __repr__(self) -> str:
        return f"{self.entry.name}: {self.entry.dtype} {list(self.shape)}"

    def __getitem__(self, index: Examples) -> torch.Tensor:
        numbers = self._numbers(index)
        if isinstance(numbers, int):
            (rows,) = self._pieces([numbers])
            return rows if self.entry.axis == "token" else rows[0]
        pieces = self._pieces(numbers)
        # The empty tensor gives the shape and dtype if there are no pieces.
        empty = torch.empty((0, *self.entry.shape), dtype=self.dtype, device="cpu")
        return pieces[0] if len(pieces) == 1 else torch.cat([empty, *pieces])

    def _numbers(self, index: Examples) -> int | Sequence[int]:
        """Resolve an index to an example's number, or to several, as Python and numpy do."""
        index = index.tolist() if isinstance(index, torch.Tensor) else index
        if isinstance(index, bool):
            raise IndexError(
                f"{self.entry.name} is indexed by examples, but {index} is none: write a number, "
                "or a list with True or False for each example"
            )
        if isinstance(index, int) and not -len(self) <= index < len(self):
            raise IndexError(f"{self.entry.name} has {len(self)} examples, and no example {index}")
        if isinstance(index, int | slice):
            return range(len(self))[index]
        if not isinstance(index, tuple):
            numbers = np.arange(len(self))[index]
            if numbers.ndim <= 1:
                return numbers.tolist()  # type: ignore[no-any-return]
        raise IndexError(f"{self.entry.name} is indexed by examples only: saved[name][3:7][:, 0]")

    def map_shard(self, number: int) -> torch.Tensor:
        """Map all rows of a shard, which are read from the disk when they are used."""
        # Map it on each call: a caller may change the tensor in place.
        shard, entry = self._index.shards[number], self.entry
        path = self._directory / shard.file
        verify = "load_activations(directory).verify() checks all shards"
        try:
            with safe_open(str(path), framework="pt", device="cpu") as file:
                examples = (file.metadata() or {}).get("examples")
                rows: torch.Tensor = file.get_tensor(entry.name)
            shape = shard.rows(entry), *entry.shape
            expected = f"{shard.start}:{shard.stop}", entry.torch_dtype, shape
            # A file copied from another directory has a valid header too.
            if (examples, rows.dtype, rows.shape) != expected:
                raise SafetensorError("it is not the one in the index")
        except FileNotFoundError:
            raise FileNotFoundError(f"{path} is missing: {verify}") from None
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged ({error}): {verify}") from error
        return rows

    def rows_of_shards(self) -> list[int]:
        """Return the number of rows of each shard."""
        return [shard.rows(self.entry) for shard in self._index.shards]

    def _pieces(self, numbers: Sequence[int]) -> list[torch.Tensor]:
        """Return the rows of some examples, in one piece for each run of consecutive ones."""
        pieces: list[torch.Tensor] = []
        mapped: dict[int, torch.Tensor] = {}  # each shard is mapped once
        at = 0
        while at < len(numbers):
            start = numbers[at]
            shards = self._index.shards
            number = bisect.bisect_right(shards, start, key=lambda shard: shard.start) - 1
            shard, count = shards[number], 1
            # A slice for consecutive examples is a view; single rows would be copied.
            while at + count < len(numbers) and numbers[at + count] == start + count < shard.stop:
                count += 1
            if number not in mapped:
                mapped[number] = self.map_shard(number)
            first = start - shard.start
            pieces.append(mapped[number][self._rows(number, first, first + count)])
            at += count
        return pieces

    def _rows(self, shard: int, start: int, stop: int) -> slice:
        """Return the range of rows that belong to some examples of a shard."""
        if self.entry.axis == "example":
            return slice(start, stop)
        if shard not in self._ends:
            (mask,) = (entry for entry in self._index.entries if entry.name == TOKEN_MASK)
            saved = Stored(self._directory, self._index, mask).map_shard(shard)
            self._ends[shard] = [0, *saved.sum(1).cumsum(0).tolist()]
        return slice(self._ends[shard][start], self._ends[shard][stop])

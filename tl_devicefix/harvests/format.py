"""What is on disk: an `index.json`, and shards, which are safetensors files of whole examples.

All that is written appears under its name when it is whole and synced. What is in no index is not
there: a shard is added to the index once it has its name.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal

import torch
import xxhash

VERSION = 1
INDEX = "index.json"
SHARDS = "shard-*.safetensors"
TEMPORARY = ".part"
"""What the names of files end with that are not whole."""

TOKENS, MASK, KEPT = "tokens", "attention_mask", "kept"
"""What is stored with the activations, in the same way."""

Axis = Literal["example", "token", "shared"]
Pieces = Mapping[str, Sequence[torch.Tensor]]
"""By name, tensors on the CPU that follow each other along their first axis."""

_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""How safetensors calls dtypes."""


@dataclass(frozen=True)
class Entry:
    """What is stored under one name.

    Attributes:
        name: as a cache has it.
        dtype: torch's name of it, such as "bfloat16".
        shape: of one row; of all, if it is shared.
        axis: whether a row is of an example or of a token that was kept. What is shared has no such
            axis, is the same in each batch, and is in each shard.
        same_as: the entry under which a shard has it, if a cache has one tensor by two names.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    axis: Axis = "example"
    same_as: str | None = None

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
    """A file, with the examples from `start` up to `stop`, of which `tokens` tokens were kept.

    Its checksum is of a kind that is many times as fast as a disk.
    """

    file: str
    start: int
    stop: int
    tokens: int
    bytes: int
    xxh3_128: str


@dataclass(frozen=True)
class Index:
    """What a directory has, as `index.json` says it.

    Attributes:
        model: its name, class, and the fields of its config that say what shapes it has.
        made_by: versions of what wrote it.
        entries: what is stored, in a cache's order; tokens and masks first.
        examples_per_shard: in each but the last.
        shards: in order.
        is_complete: whether all examples that there were are in it.
        version: of this format.
    """

    model: dict[str, Any]
    made_by: dict[str, str]
    entries: tuple[Entry, ...]
    examples_per_shard: int
    shards: tuple[Shard, ...] = ()
    is_complete: bool = False
    version: int = field(default=VERSION)

    @property
    def n_examples(self) -> int:
        """How many are stored."""
        return self.shards[-1].stop if self.shards else 0

    @property
    def n_bytes(self) -> int:
        """The size of all shards."""
        return sum(shard.bytes for shard in self.shards)

    def with_shard(self, shard: Shard) -> Index:
        """The same, with one shard more."""
        return replace(self, shards=(*self.shards, shard))


def shard_name(number: int) -> str:
    """The name of a shard's file."""
    return f"shard-{number:05d}.safetensors"


def read_index(directory: Path) -> Index:
    """The index of a directory.

    Raises:
        FileNotFoundError: if it has none.
        ValueError: if it cannot be read, or is of another version.
    """
    try:
        read = json.loads((directory / INDEX).read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(
            f"there is no harvest in {directory}: it has no {INDEX}, which tl_devicefix.harvest "
            "writes with the first batch"
        ) from None
    except ValueError as error:
        raise ValueError(f"{directory / INDEX} is damaged: {error}") from error
    if not isinstance(read, dict):
        raise ValueError(f"{directory / INDEX} is damaged: it is no object")
    if read.get("version") != VERSION:
        raise ValueError(
            f"the harvest in {directory} is of version {read.get('version')} of the format, but "
            f"this tl_devicefix reads version {VERSION}"
        )
    try:
        entries = tuple(Entry(**{**e, "shape": tuple(e["shape"])}) for e in read.pop("entries"))
        shards = tuple(Shard(**each) for each in read.pop("shards"))
        return Index(entries=entries, shards=shards, **read)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{directory / INDEX} is damaged: {error}") from error


def write_index(directory: Path, index: Index) -> None:
    """Put an index in the place of the one that is there."""
    text = json.dumps(asdict(index), indent=1) + "\n"
    write_whole(directory / INDEX, lambda file: file.write(text.encode()))


def write_whole(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Write a file that has its name only when all of it is on the disk.

    Args:
        path: what is there is replaced.
        write: given the open file. If it fails, nothing is left of it.
    """
    part = path.with_name(path.name + TEMPORARY)
    try:
        with part.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def write_shard(path: Path, pieces: Pieces, metadata: Mapping[str, str]) -> tuple[int, str]:
    """Write a safetensors file of tensors that are in pieces, which are not put together first.

    Args:
        path: of the file.
        pieces: the tensors.
        metadata: a text for the file's header.

    Returns:
        Its bytes, and its checksum.
    """
    # As safetensors does: the widest dtypes first, so that each tensor is aligned.
    names = sorted(pieces, key=lambda name: -pieces[name][0].itemsize)
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in names:
        first, start = pieces[name][0], end
        end += sum(piece.nbytes for piece in pieces[name])
        rows = sum(len(piece) if piece.dim() else 1 for piece in pieces[name])
        header[name] = {
            "dtype": _CODES[first.dtype],
            "shape": [rows, *first.shape[1:]] if first.dim() else [],
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    checksum = xxhash.xxh3_128()

    def write(file: BinaryIO) -> None:
        flat = (_bytes_of(piece) for name in names for piece in pieces[name])
        for part in (struct.pack("<Q", len(text)), text, *flat):
            file.write(part)
            checksum.update(part)

    write_whole(path, write)
    return 8 + len(text) + end, checksum.hexdigest()


def _bytes_of(tensor: torch.Tensor) -> Any:
    """The memory of a contiguous tensor on the CPU."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors on the CPU are equal bit for bit, also where they are no numbers."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)))


def can_be_stored(dtype: torch.dtype) -> bool:
    """Whether safetensors has a dtype."""
    return dtype in _CODES


def faults(directory: Path, index: Index) -> Iterable[str]:
    """What is wrong with each shard that is not as it was written, in a sentence."""
    for shard in index.shards:
        path = directory / shard.file
        if not path.is_file():
            yield f"{shard.file} is missing"
        elif (size := path.stat().st_size) != shard.bytes:
            yield f"{shard.file} has {size} bytes, but was written with {shard.bytes}"
        elif checksum_of(path) != shard.xxh3_128:
            yield f"{shard.file} is damaged: its checksum is not that of what was written"


def checksum_of(path: Path) -> str:
    """The checksum of a file, as `xxh128sum` has it."""
    checksum, chunk = xxhash.xxh3_128(), bytearray(2**20)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(chunk):
            checksum.update(memoryview(chunk)[:count])
    return checksum.hexdigest()

"""The files on disk: an `index.json`, and shards, which are safetensors files of whole examples.

A file gets its name when it is complete and synced, and a shard is added to the index after that.
Files that are in no index are not read.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Literal

import torch
from xxhash import xxh3_128

VERSION = 3
INDEX = "index.json"
SHARDS = "shard-*.safetensors"
TEMPORARY = ".part"
"""The names of files end with it until they are complete."""

TOKENS, MASK, TOKEN_MASK = "tokens", "attention_mask", "token_mask"
"""Names of the tensors that are stored beside activations."""
NOT_BY_TOKEN = ("hook_pattern", "hook_attn_scores")
"""Activations whose second axis is a head, and not a position."""

Axis = Literal["example", "token"]
Pieces = Mapping[str, Sequence[torch.Tensor]]
"""By name, tensors on the CPU that follow each other along their first axis."""

_CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
"""By torch's names of dtypes, those of safetensors."""


@dataclass(frozen=True)
class Entry:
    """The tensors that are stored under one name.

    Attributes:
        name: as a cache has it.
        dtype: torch's name of it, such as "bfloat16".
        shape: of one row.
        axis: whether a row is of an example or of a saved token.
        same_as: the entry under which shards have it, if a cache has one tensor by two names.
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
    """A file, with the examples from `start` up to `stop`, of which `tokens` tokens were saved."""

    file: str
    start: int
    stop: int
    tokens: int
    bytes: int
    xxh3_128: str


@dataclass(frozen=True)
class Index:
    """The contents of a directory, as `index.json` lists them.

    Attributes:
        model: its name, class, and the fields of its config that say what shapes it has.
        made_by: versions of the packages that computed and wrote them.
        entries: in a cache's order; tokens and masks first.
        examples_per_shard: in each but the last.
        shards: in order.
        is_complete: whether it has all examples that there were.
        version: of this format.
    """

    model: dict[str, Any]
    made_by: dict[str, str]
    entries: tuple[Entry, ...]
    examples_per_shard: int
    shards: tuple[Shard, ...] = ()
    is_complete: bool = False
    version: int = VERSION

    @property
    def n_examples(self) -> int:
        """How many are stored."""
        return self.shards[-1].stop if self.shards else 0

    @property
    def n_bytes(self) -> int:
        """The size of all shards."""
        return sum(shard.bytes for shard in self.shards)


def shard_name(number: int) -> str:
    """The name of a shard's file."""
    return f"shard-{number:05d}.safetensors"


def read_index(directory: Path) -> Index:
    """The index of a directory.

    Raises:
        FileNotFoundError: if it has none.
        ValueError: if it is not as it was written, or is of another version.
    """
    path = directory / INDEX
    damaged = f"{path} is damaged: put back a copy of it, or save again to another directory"
    try:
        fields = json.loads(path.read_text())
        version, written = fields["version"], fields.pop(_CHECKSUM, None)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(
            f"there are no saved activations in {directory}: it has no {INDEX}, which "
            "tl_devicefix.save_activations writes with the first batch"
        ) from None
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(damaged) from error
    if version != VERSION:
        raise ValueError(
            f"the activations in {directory} are of version {version} of the format, but this "
            f"tl_devicefix reads version {VERSION}: save them again to another directory"
        )
    if written != _checksum_of_fields(fields):
        raise ValueError(damaged)
    entries = tuple(Entry(**{**e, "shape": tuple(e["shape"])}) for e in fields.pop("entries"))
    shards = tuple(Shard(**shard) for shard in fields.pop("shards"))
    return Index(entries=entries, shards=shards, **fields)


_CHECKSUM = "xxh3_128"


def _checksum_of_fields(fields: Mapping[str, Any]) -> str:
    """The checksum of an index: of its other fields, however they are laid out in the file."""
    return str(xxh3_128(json.dumps(fields, sort_keys=True).encode()).hexdigest())


def write_index(directory: Path, index: Index) -> None:
    """Put an index in the place of the last one."""
    fields = asdict(index)
    text = json.dumps({**fields, _CHECKSUM: _checksum_of_fields(fields)}, indent=1) + "\n"
    write_file(directory / INDEX, lambda file: file.write(text.encode()))


def write_file(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Write a file that has its name only when all of it is on the disk.

    Args:
        path: of the file, which is replaced if it exists.
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


def write_shard(path: Path, pieces: Pieces, start: int, stop: int) -> tuple[int, str]:
    """Write a safetensors file of tensors that are in pieces, which are not put together first.

    Args:
        path: of the file.
        pieces: the tensors.
        start: the first of the examples that they are of.
        stop: the first of the next shard's.

    Returns:
        Its bytes, and its checksum.
    """
    tensors = {
        name: (of[0].dtype, (sum(map(len, of)), *of[0].shape[1:])) for name, of in pieces.items()
    }
    checksum = xxh3_128()

    def write(file: BinaryIO) -> None:
        parts: Iterator[Any] = (
            piece.reshape(-1).view(torch.uint8).numpy()
            for name in _in_order(tensors)
            for piece in pieces[name]
        )
        for part in chain([_header(tensors, start, stop)], parts):
            file.write(part)
            checksum.update(part)

    write_file(path, write)
    return path.stat().st_size, str(checksum.hexdigest())


Tensors = Mapping[str, tuple[torch.dtype, Sequence[int]]]
"""By name, the dtype and the shape of each."""


def _in_order(tensors: Tensors) -> list[str]:
    """As safetensors does: the widest dtypes first, so that each tensor is aligned."""
    return sorted(tensors, key=lambda name: -tensors[name][0].itemsize)


def _header(tensors: Tensors, start: int, stop: int) -> bytes:
    """The header of a safetensors file with some examples."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "examples": f"{start}:{stop}"}}
    end = 0
    for name in _in_order(tensors):
        dtype, shape = tensors[name]
        first, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": _CODES[dtype_name(dtype)],
            "shape": list(shape),
            "data_offsets": [first, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def has_its_header(path: Path, index: Index, shard: Shard) -> bool:
    """Whether a file begins as that of a shard: with its examples, and what the index has."""
    tensors = {
        e.name: (
            e.torch_dtype,
            (shard.tokens if e.axis == "token" else shard.stop - shard.start, *e.shape),
        )
        for e in index.entries
        if e.same_as is None
    }
    header = _header(tensors, shard.start, shard.stop)
    with path.open("rb") as file:
        return file.read(len(header)) == header


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors on the CPU are equal bit for bit, also where they are no numbers."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)))


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype's name in torch, without "torch."."""
    return str(dtype).removeprefix("torch.")


def can_be_stored(dtype: torch.dtype) -> bool:
    """Whether safetensors has a dtype."""
    return dtype_name(dtype) in _CODES


def shard_faults(directory: Path, index: Index, checksums: bool) -> Iterator[str]:
    """A sentence for each shard that is not as it was written.

    Args:
        directory: where they are.
        index: of them.
        checksums: read all of them; else only missing files and other sizes are found.
    """
    for shard in index.shards:
        path = directory / shard.file
        if not path.is_file():
            yield f"{shard.file} is missing"
        elif (size := path.stat().st_size) != shard.bytes:
            yield f"{shard.file} has {size} bytes, but was written with {shard.bytes}"
        elif checksums and _checksum_of(path) != shard.xxh3_128:
            yield f"{shard.file} is damaged: its checksum is not that of what was written"


def _checksum_of(path: Path) -> str:
    checksum, chunk = xxh3_128(), memoryview(bytearray(2**20))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(chunk):
            checksum.update(chunk[:count])
    return str(checksum.hexdigest())

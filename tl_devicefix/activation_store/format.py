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
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args

import torch
from xxhash import xxh3_128 as checksum

VERSION = 2
INDEX = "index.json"
SHARDS = "shard-*.safetensors"
TEMPORARY = ".part"
"""The names of files end with it until they are complete."""

TOKENS, MASK, TOKEN_MASK = "tokens", "attention_mask", "kept"
"""Names of the tensors that are stored beside activations."""
NOT_BY_TOKEN = ("hook_pattern", "hook_attn_scores")
"""Activations whose second axis is a head, and not a position."""

Axis = Literal["example", "token", "shared"]
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
        shape: of one row; of all, if the tensor is shared.
        axis: whether a row is of an example or of a saved token. A shared tensor has no such axis,
            is the same in each batch, and is in each shard.
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
    """A file, with the examples from `start` up to `stop`, of which `tokens` tokens were saved.

    Its checksum is that of the checksums of its header and of each tensor, in the file's order.
    """

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
        ValueError: if it cannot be read, is not as it was written, or is of another version.
    """
    path = directory / INDEX
    try:
        read = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(
            f"there are no saved activations in {directory}: it has no {INDEX}, which "
            "tl_devicefix.save_activations writes with the first batch"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(read, dict):
        raise ValueError(f"{path} is damaged: it has no JSON object")
    if read.get("version") != VERSION:
        raise ValueError(
            f"the activations in {directory} are of version {read.get('version')} of the format, "
            f"but this tl_devicefix reads version {VERSION}: save them again to another directory"
        )
    if read.pop(_CHECKSUM, None) != _checksum_of_fields(read):
        raise ValueError(
            f"{path} is damaged: its checksum is not that of what was written; put back a copy of "
            "it, or save again to another directory"
        )
    try:
        entries = tuple(Entry(**{**e, "shape": tuple(e["shape"])}) for e in read.pop("entries"))
        shards = tuple(Shard(**each) for each in read.pop("shards"))
        index = Index(entries=entries, shards=shards, **read)
        wrong = next(_wrong_in(index), None)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if wrong is not None:
        raise ValueError(f"{path} is damaged: {wrong}")
    return index


_CHECKSUM = "xxh3_128"
_MOST = 2**60
"""Values in one row."""


def _checksum_of_fields(fields: Mapping[str, Any]) -> str:
    """The checksum of an index: of its other fields, however they are laid out in the file."""
    return str(checksum(json.dumps(fields, sort_keys=True).encode()).hexdigest())


def _wrong_in(index: Index) -> Iterator[str]:
    """What an index says that cannot be."""
    stored = {entry.name: entry for entry in index.entries if entry.same_as is None}
    n_bytes = dict.fromkeys(get_args(Axis), 0)
    for entry in index.entries:
        is_known = entry.dtype in _CODES and entry.axis in n_bytes
        if not is_known or not _is_shape(entry.shape):
            yield f"{entry.name} cannot be {entry.dtype} {entry.shape} by {entry.axis}"
        elif entry.same_as is None:
            n_bytes[entry.axis] += entry.row_bytes
        elif replace(entry, name=entry.same_as, same_as=None) != stored.get(entry.same_as):
            yield f"{entry.name} is not the same as {entry.same_as}"
    if len({entry.name for entry in index.entries}) < len(index.entries):
        yield "a name is in it twice"
    if not {TOKENS, MASK} <= stored.keys():
        yield f"it has no {TOKENS} or no {MASK}"
    if not _is_count(index.examples_per_shard, 1) or type(index.is_complete) is not bool:
        yield f"examples_per_shard cannot be {index.examples_per_shard!r}"
    end = 0
    for number, shard in enumerate(index.shards):
        sizes = (shard.start, shard.stop, shard.tokens, shard.bytes)
        if not all(_is_count(size, 0) for size in sizes) or shard.file != shard_name(number):
            yield f"{shard.file!r} is no shard {number}"
        full = shard.start + index.examples_per_shard
        is_last = number == len(index.shards) - 1
        if shard.start != end or not (shard.stop == full or (is_last and end < shard.stop < full)):
            yield f"{shard.file} cannot have the examples {shard.start} to {shard.stop}"
        rows = _n_rows(shard)
        if sum(rows[axis] * size for axis, size in n_bytes.items()) >= shard.bytes:
            yield f"{shard.file} is smaller than its tensors"
        end = shard.stop


def _is_shape(shape: tuple[object, ...]) -> bool:
    """Whether it is one that torch can count."""
    counts = [size for size in shape if isinstance(size, int) and _is_count(size, 0)]
    return len(counts) == len(shape) and math.prod(max(size, 1) for size in counts) <= _MOST


def _is_count(value: object, least: int) -> bool:
    return type(value) is int and value >= least


def write_index(directory: Path, index: Index) -> None:
    """Put an index in the place of the one that is there."""
    fields = asdict(index)
    text = json.dumps({**fields, _CHECKSUM: _checksum_of_fields(fields)}, indent=1) + "\n"
    write_whole(directory / INDEX, lambda file: file.write(text.encode()))


def write_whole(path: Path, write: Callable[[BinaryIO], Any]) -> None:
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
        name: (of[0].dtype, (sum(map(len, of)), *of[0].shape[1:]) if of[0].dim() else ())
        for name, of in pieces.items()
    }
    header = _header(tensors, start, stop)
    checksums = [checksum(header).digest()]

    def write(file: BinaryIO) -> None:
        file.write(header)
        for name in _in_order(tensors):
            of_tensor = checksum()
            for piece in pieces[name]:
                values: Any = piece.reshape(-1).view(torch.uint8).numpy()
                file.write(values)
                of_tensor.update(values)
            checksums.append(of_tensor.digest())

    write_whole(path, write)
    return path.stat().st_size, _checksum_of_all(*checksums)


Tensors = Mapping[str, tuple[torch.dtype, Sequence[int]]]
"""By name, the dtype and the shape of each."""


def _in_order(tensors: Tensors) -> list[str]:
    """As safetensors does: the widest dtypes first, so that each tensor is aligned."""
    return sorted(tensors, key=lambda name: -tensors[name][0].itemsize)


def _header(tensors: Tensors, start: int, stop: int) -> bytes:
    """How a safetensors file begins, with some examples."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "examples": f"{start}:{stop}"}}
    end = 0
    for name in _in_order(tensors):
        dtype, shape = tensors[name]
        first, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": _CODES[_name_of(dtype)],
            "shape": list(shape),
            "data_offsets": [first, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def has_its_header(path: Path, index: Index, shard: Shard) -> bool:
    """Whether a file begins as that of a shard: with its examples, and what the index has."""
    rows = _n_rows(shard)
    tensors = {
        e.name: (e.torch_dtype, e.shape if e.axis == "shared" else (rows[e.axis], *e.shape))
        for e in index.entries
        if e.same_as is None
    }
    header = _header(tensors, shard.start, shard.stop)
    with path.open("rb") as file:
        return file.read(len(header)) == header


def _n_rows(shard: Shard) -> dict[Axis, int]:
    """How many rows of each axis a shard has."""
    return {"example": shard.stop - shard.start, "token": shard.tokens, "shared": 1}


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors on the CPU are equal bit for bit, also where they are no numbers."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)))


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def can_be_stored(dtype: torch.dtype) -> bool:
    """Whether safetensors has a dtype."""
    return _name_of(dtype) in _CODES


def resized(directory: Path, index: Index) -> Iterator[str]:
    """A sentence for each shard whose file is missing or of another size; none is read."""
    return filter(None, (_resized(directory, shard) for shard in index.shards))


def _resized(directory: Path, shard: Shard) -> str | None:
    path = directory / shard.file
    if not path.is_file():
        return f"{shard.file} is missing"
    if (size := path.stat().st_size) != shard.bytes:
        return f"{shard.file} has {size} bytes, but was written with {shard.bytes}"
    return None


def damaged(directory: Path, index: Index) -> Iterator[str]:
    """A sentence for each shard that is not as it was written; all are read."""
    for shard in index.shards:
        path = directory / shard.file
        if fault := _resized(directory, shard):
            yield fault
        elif _checksum_of(path, index, shard) != shard.xxh3_128:
            yield f"{shard.file} is damaged: its checksum is not that of what was written"
        elif not has_its_header(path, index, shard):
            yield f"{shard.file} is not the shard of these examples that {INDEX} lists"


def _checksum_of(path: Path, index: Index, shard: Shard) -> str:
    n_rows = _n_rows(shard)
    stored = [entry for entry in index.entries if entry.same_as is None]
    stored.sort(key=lambda entry: -entry.torch_dtype.itemsize)
    sizes = [entry.row_bytes * n_rows[entry.axis] for entry in stored]
    checksums, chunk = [], memoryview(bytearray(2**20))
    with path.open("rb", buffering=0) as file:
        for size in [shard.bytes - sum(sizes), *sizes]:
            of_part = checksum()
            while size > 0 and (count := file.readinto(chunk[:size])):
                of_part.update(chunk[:count])
                size -= count
            checksums.append(of_part.digest())
    return _checksum_of_all(*checksums)


def _checksum_of_all(*checksums: bytes) -> str:
    return str(checksum(b"".join(checksums)).hexdigest())

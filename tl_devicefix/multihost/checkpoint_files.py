"""Weights that lie in a checkpoint's file: a rank reads its own from its own disk.

Whether that is the same file is asked before anything is read, tensor by tensor: `differences`.
Tensors are compared whole, but large ones by samples at even distances: weights of two trainings
differ everywhere, and what was put into one of them, as new tokens are, is seen if it is as long as
that distance.
"""

from __future__ import annotations

import functools
import hashlib
import json
import mmap
import os
import zipfile
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

_LEAST = 1 << 12
"""Bytes below which values are sent."""
_SAMPLE, _DISTANCE, _WHOLE = 1 << 12, 1 << 18, 1 << 20
"""Bytes of a sample, from one to the next, and up to which a tensor is compared whole."""


class File(NamedTuple):
    """A file, as it is known to be the same on two hosts."""

    path: str
    nbytes: int
    checksum: str
    """Of all that `checksums_of` gives."""


class InFile(NamedTuple):
    """Where values are in a file, which is mapped into memory."""

    file: File
    offset: int
    """Of the first value, in bytes."""


def in_file(tensor: torch.Tensor) -> InFile | None:
    """Where the values of a CPU tensor are in a file; None if they are not in one.

    It reads what the system says is mapped (Linux alone says so).
    """
    if tensor.nbytes < _LEAST or tensor.is_conj() or tensor.is_neg():
        return None
    mapping = _mapped_at(tensor.data_ptr())
    if mapping is None:
        return None
    path, offset = mapping
    if offset % tensor.itemsize or not os.path.exists(path):
        return None
    return InFile(current_file(path), offset) if _is_as_in_file(tensor) else None


def _mapped_at(address: int) -> tuple[str, int] | None:
    """The file that is mapped at an address, and where in it that is."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    with maps.open() as lines:
        for line in lines:
            span, _, start, _, inode, *path = line.split(maxsplit=5)
            first, _, last = span.partition("-")
            if int(first, 16) <= address < int(last, 16):
                if inode == "0" or not path or not path[0].startswith("/"):
                    return None
                return path[0].rstrip("\n"), address - int(first, 16) + int(start, 16)
    return None


def current_file(path: str) -> File:
    """A file, as it is now."""
    return _file(path, _state(path))


def checksums_of(path: str) -> dict[str, str]:
    """A checksum of each tensor of a file, by name: of its place, its kind, and samples."""
    return _parts(path, _state(path))


def differences(files: tuple[File, ...], checksums: tuple[dict[str, str], ...]) -> dict[str, str]:
    """Which files of another rank are not here, or are others here, by path; and why."""
    reasons = {}
    for file, theirs in zip(files, checksums, strict=True):
        try:
            own_file, own = current_file(file.path), checksums_of(file.path)
        except OSError as error:
            reasons[file.path] = f"cannot read it: {error.strerror}"
            continue
        if own_file != file:
            sizes = f" ({own_file.nbytes} bytes, and rank 0's {file.nbytes})"
            size = " of the same size" if own_file.nbytes == file.nbytes else sizes
            reasons[file.path] = f"has another one{size}{_which(own, theirs)}"
    return reasons


def _which(own: dict[str, str], theirs: dict[str, str]) -> str:
    """Which tensors differ, as a clause, if the files have any."""
    names = [name for name in {**theirs, **own} if own.get(name) != theirs.get(name) and name]
    more = f" (and {len(names) - 1} more)" if names[1:] else ""
    return f", of which {names[0]!r}{more} differs" if names else ""


def read(
    where: InFile, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """The values, of this rank's own file, which is the same as rank 0's."""
    mapped = _map(where.file.path, _state(where.file.path))
    tensor = torch.empty(0, dtype=dtype)
    return tensor.set_(mapped, where.offset // dtype.itemsize, shape, stride)  # type: ignore[call-overload]


def _state(path: str) -> tuple[int, ...]:
    """What changes when a file is written again."""
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns, status.st_ino


def _is_as_in_file(tensor: torch.Tensor) -> bool:
    """Whether nobody has written to a mapped tensor: what is written becomes the process's own."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    first = tensor.data_ptr()
    page, end = first // mmap.PAGESIZE, (first + (last + 1) * tensor.itemsize - 1) // mmap.PAGESIZE
    try:
        with open("/proc/self/pagemap", "rb") as pages:
            pages.seek(page * 8)
            raw = bytearray(pages.read((end - page + 1) * 8))
    except OSError:
        return False
    entries = torch.frombuffer(raw, dtype=torch.int64)
    is_present, is_swapped, is_of_file = (entries >> bit & 1 for bit in (63, 62, 61))
    return not bool((is_swapped | is_present & (1 - is_of_file)).any())


@functools.lru_cache(4096)
def _file(path: str, state: tuple[int, ...]) -> File:
    parts = json.dumps(sorted(_parts(path, state).items()))
    return File(path, state[0], hashlib.sha256(parts.encode()).hexdigest())


@functools.lru_cache(4096)
def _parts(path: str, state: tuple[int, ...]) -> dict[str, str]:
    nbytes, *_ = state
    tensors = _tensors_in(path)
    with Path(path).open("rb") as file:
        return {
            name: f"{first} {end} {kind} {_sampled(file, first, min(end, nbytes))}"
            for name, (first, end, kind) in (tensors or {"": (0, nbytes, "")}).items()
        }


def _sampled(file: BinaryIO, first: int, end: int) -> str:
    """A checksum of a part of a file: of all of it, or of samples from its beginning to its end."""
    checksum = hashlib.sha256()
    if end - first <= _WHOLE:
        checksum.update(os.pread(file.fileno(), max(end - first, 0), first))
    else:
        for start in (*range(first, end - _SAMPLE, _DISTANCE), end - _SAMPLE):
            checksum.update(os.pread(file.fileno(), _SAMPLE, start))
    return checksum.hexdigest()


def _tensors_in(path: str) -> dict[str, tuple[int, int, str]]:
    """Where tensors lie in a file, and of what kind they are; nothing if that is not known.

    Those of a `.bin`, which is a zip file, have numbers, and checksums of all that is in them.
    """
    tensors = {}
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                for entry in archive.infolist():
                    first, end = entry.header_offset, entry.header_offset + entry.file_size
                    tensors[entry.filename] = first, end, f"{entry.CRC:x}"
            return tensors
        with Path(path).open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length)) if length < os.path.getsize(path) else {}
        for name, description in header.items():
            if name != "__metadata__":
                first, end = (8 + length + abs(int(at)) for at in description["data_offsets"])
                tensors[name] = first, end, str(description)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError, zipfile.BadZipFile):
        return {}  # it is neither
    return tensors


@functools.lru_cache(4096)
def _map(path: str, state: tuple[int, ...]) -> torch.UntypedStorage:
    mapped: Any = torch.UntypedStorage.from_file(path, shared=False, nbytes=state[0])
    return mapped  # type: ignore[no-any-return]

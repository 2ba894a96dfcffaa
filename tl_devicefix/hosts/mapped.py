"""Weights that lie in a checkpoint's file: a rank reads its own from its own disk.

Whether that is the same file is asked before anything is read: `differences`.
"""

from __future__ import annotations

import functools
import hashlib
import mmap
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch

_LEAST = 1 << 12
"""Bytes below which values are sent."""
_LOOKED_AT = 1 << 16
"""Bytes of a file's beginning, where safetensors says what is in it, its middle and its end."""


class File(NamedTuple):
    """A file, as it is known to be the same on two hosts."""

    path: str
    nbytes: int
    checksum: str
    """Of its beginning, its middle and its end."""


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
    found = _mapped_at(tensor.data_ptr())
    if found is None:
        return None
    path, offset = found
    if offset % tensor.itemsize or not os.path.exists(path):
        return None
    return InFile(known(path), offset) if _is_as_in_file(tensor) else None


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


def known(path: str) -> File:
    """A file, as it is now.

    Raises:
        OSError: if it cannot be read.
    """
    return _known(path, _state(path))


def differences(files: tuple[File, ...]) -> dict[str, str]:
    """Which files of another rank are not here, or are others here, by path; and why."""
    found = {}
    for file in files:
        try:
            here = known(file.path)
        except OSError as error:
            found[file.path] = f"cannot read it: {error.strerror}"
            continue
        if here != file:
            sizes = f"{here.nbytes} bytes, and rank 0's {file.nbytes}"
            found[file.path] = "has another one" + (
                f" ({sizes})" if here.nbytes != file.nbytes else " of the same size"
            )
    return found


def read(
    where: InFile, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """The values, of this rank's own file, which is the same as rank 0's."""
    mapped = _map(where.file.path, _state(where.file.path))
    tensor = torch.empty(0, dtype=dtype)
    return tensor.set_(mapped, where.offset // dtype.itemsize, shape, stride)  # type: ignore[call-overload]


def _state(path: str) -> tuple[int, ...]:
    """What changes when a file is written again."""
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns, found.st_ino


def _is_as_in_file(tensor: torch.Tensor) -> bool:
    """Whether nobody has written to a mapped tensor: what is written becomes the process's own."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    first = tensor.data_ptr()
    page, end = first // mmap.PAGESIZE, (first + (last + 1) * tensor.itemsize - 1) // mmap.PAGESIZE
    try:
        with open("/proc/self/pagemap", "rb") as pages:
            pages.seek(page * 8)
            found = bytearray(pages.read((end - page + 1) * 8))
    except OSError:
        return False
    each = torch.frombuffer(found, dtype=torch.int64)
    is_present, is_swapped, is_of_file = (each >> bit & 1 for bit in (63, 62, 61))
    return not bool((is_swapped | is_present & (1 - is_of_file)).any())


@functools.lru_cache(4096)
def _known(path: str, state: tuple[int, ...]) -> File:
    nbytes, *_ = state
    checksum = hashlib.sha256()
    with Path(path).open("rb") as file:
        for start in (0, nbytes // 2, max(nbytes - _LOOKED_AT, 0)):
            file.seek(start)
            checksum.update(file.read(_LOOKED_AT))
    return File(path, nbytes, checksum.hexdigest())


@functools.lru_cache(4096)
def _map(path: str, state: tuple[int, ...]) -> torch.UntypedStorage:
    mapped: Any = torch.UntypedStorage.from_file(path, shared=False, nbytes=state[0])
    return mapped  # type: ignore[no-any-return]

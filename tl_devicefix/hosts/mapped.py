"""Weights that lie in a checkpoint's file: a rank reads its own from its own disk."""

from __future__ import annotations

import functools
import hashlib
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch

_LEAST = 1 << 12
"""Bytes below which values are sent."""
_HEADER = 1 << 16
"""Bytes of a file's beginning, by which it is known: safetensors says there what is in it."""


class InFile(NamedTuple):
    """Where values are in a file, which is mapped into memory."""

    path: str
    nbytes: int
    """Of the file."""
    header: str
    """A checksum of how it begins."""
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
    nbytes, header = known_by(path)
    return InFile(path, nbytes, header, offset)


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


@functools.cache
def known_by(path: str) -> tuple[int, str]:
    """The size of a file, and a checksum of how it begins."""
    with Path(path).open("rb") as file:
        return os.path.getsize(path), hashlib.sha256(file.read(_HEADER)).hexdigest()


def read(
    where: InFile, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """The values, of this rank's own file.

    Raises:
        RuntimeError: if it has no such file, or another one.
    """
    try:
        nbytes, header = known_by(where.path)
    except OSError as error:
        raise RuntimeError(
            f"the checkpoint's file {where.path} cannot be read here: {error.strerror}; put it "
            "there, or give the loaded model as hf_model, whose weights are sent"
        ) from error
    if (nbytes, header) != (where.nbytes, where.header):
        raise RuntimeError(
            f"the checkpoint's file {where.path} is another one than rank 0's ({nbytes} bytes "
            f"here, {where.nbytes} there): all ranks need the same"
        )
    mapped = _map(where.path, nbytes)
    tensor = torch.empty(0, dtype=dtype)
    return tensor.set_(mapped, where.offset // dtype.itemsize, shape, stride)  # type: ignore[call-overload]


@functools.cache
def _map(path: str, nbytes: int) -> torch.UntypedStorage:
    mapped: Any = torch.UntypedStorage.from_file(path, shared=False, nbytes=nbytes)
    return mapped  # type: ignore[no-any-return]

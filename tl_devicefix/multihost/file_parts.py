"""Parts of files that a rank writes, and reads, on its own host."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash

Pieces = Sequence[torch.Tensor]
"""A tensor as contiguous ones that follow each other along its first axis."""

_AT_ONCE = 1 << 24
"""Bytes that are written together, if pieces are smaller."""


def checksum(of: bytes = b"") -> Any:
    """A checksum, which may be gone on with; it is many times as fast as a disk."""
    return xxhash.xxh3_128(of)


def write_at(file: BinaryIO, offset: int, tensors: Iterable[Pieces]) -> list[bytes]:
    """Write tensors that follow each other from a place of a file on; returns their checksums."""
    file.seek(offset)
    found = []
    for pieces in tensors:
        of_tensor = checksum()
        for piece in pieces:
            values: Any = piece.reshape(-1).view(torch.uint8).numpy()
            file.write(values)
            of_tensor.update(values)
        found.append(of_tensor.digest())
    return found


def text_of(path: str) -> str | None:
    """What is in a file, if it is there, and its directory may be written to."""
    try:
        is_ours = os.access(Path(path).parent, os.W_OK)
        return Path(path).read_text() if is_ours else None
    except (OSError, ValueError):
        return None


def write_into(path: str, nbytes: int, offset: int, tensors: Iterable[Pieces]) -> list[bytes]:
    """Write a part of a file that is there, onto the disk; returns the tensors' checksums.

    Raises:
        OSError: if that cannot be done, or the file has not so many bytes.
    """

    def opened(path: str, _: int) -> int:
        # By itself, NFS writes whole pages, and with them what was there before others wrote it.
        return os.open(path, os.O_WRONLY | os.O_DSYNC)

    with open(path, "wb", buffering=_AT_ONCE, opener=opened) as file:
        there = os.fstat(file.fileno()).st_size
        if there != nbytes:
            said = f"Not the file of rank 0, as it has {there} bytes here and {nbytes} there"
            raise OSError(errno.ESTALE, said)
        return write_at(file, offset, tensors)

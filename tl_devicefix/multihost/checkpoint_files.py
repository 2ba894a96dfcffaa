"""Weights that lie in a checkpoint's file: a rank reads its own from its own disk.

Whether that is the same file is asked before anything is read: `differences`. Tensors are compared
whole, but large ones by samples at even distances: weights of two trainings differ everywhere, and
what was put into one of them, as new tokens are, is seen if it is as long as that distance.
"""

from __future__ import annotations

import functools
import hashlib
import json
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tl_devicefix.checkpoints.hub import is_checkpoint_directory, snapshot

_KINDS = ("config.json", "*.index.json", "*.safetensors", "*.bin")
_LEAST = 1 << 12
"""Bytes below which values are sent."""
_SAMPLE, _DISTANCE, _WHOLE = 1 << 12, 1 << 18, 1 << 20
"""Bytes of a sample, from one to the next, and up to which a tensor is compared whole."""


class File(NamedTuple):
    """A file, by which it is known to be the same on two hosts; the checksum is of its tensors."""

    path: str
    nbytes: int
    checksum: str


class InFile(NamedTuple):
    """Where values are in a file, which is mapped into memory: the first one's offset in bytes."""

    file: File
    offset: int


def files_of(model_name: str, kwargs: dict[str, Any]) -> dict[str, Path]:
    """The files of a checkpoint that are here: their real paths, and what they are called."""
    try:
        is_directory = is_checkpoint_directory(model_name)
        folder = Path(model_name) if is_directory else snapshot(model_name, **kwargs)
    except ValueError:  # of a hub that cannot be reached, of which transformers tells
        return {}
    return {os.path.realpath(path): path for kind in _KINDS for path in sorted(folder.glob(kind))}


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


def differences(files: Sequence[File]) -> dict[str, str]:
    """Which files of another rank are not here, or are others here, by path; and why."""
    reasons = {}
    for file in files:
        try:
            own = current_file(file.path)
        except OSError as error:
            reasons[file.path] = f"cannot read it: {error.strerror}"
            continue
        if own.nbytes != file.nbytes:
            sizes = f"{own.nbytes} bytes, and rank 0's {file.nbytes}"
            reasons[file.path] = f"has another one ({sizes})"
        elif own != file:
            reasons[file.path] = "has another one of the same size"
    return reasons


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
    nbytes, *_ = state
    checksum = hashlib.sha256()
    with Path(path).open("rb") as file:
        for start, end in _parts(path, nbytes):
            if end - start <= _WHOLE:
                samples = [(start, end - start)]
            else:
                distances = (*range(start, end - _SAMPLE, _DISTANCE), end - _SAMPLE)
                samples = [(first, _SAMPLE) for first in distances]
            for first, length in samples:
                checksum.update(os.pread(file.fileno(), length, first))
    return File(path, nbytes, checksum.hexdigest())


def _parts(path: str, nbytes: int) -> list[tuple[int, int]]:
    """Beginnings and ends of a file's header and tensors, in bytes; else of all, and of its end.

    At its end, a `.bin`, which is a zip file, has checksums of all that is in it.
    """
    try:
        with Path(path).open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length)) if length < nbytes else {}
        spans = [header[name]["data_offsets"] for name in sorted(header.keys() - {"__metadata__"})]
        parts = [(8 + length + int(first), 8 + length + int(end)) for first, end in spans]
        if parts and all(0 <= first <= end <= nbytes for first, end in parts):
            of_header = range(8, 8 + length, _WHOLE)
            return [*((start, min(start + _WHOLE, 8 + length)) for start in of_header), *parts]
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        pass  # it is no safetensors file
    return [(0, nbytes), (max(nbytes - _WHOLE, 0), nbytes)]


@functools.lru_cache(4096)
def _map(path: str, state: tuple[int, ...]) -> torch.UntypedStorage:
    mapped: Any = torch.UntypedStorage.from_file(path, shared=False, nbytes=state[0])
    return mapped  # type: ignore[no-any-return]

"""Whether two hosts have the same files of a checkpoint, which is asked before any is loaded.

Tensors are compared whole, but large ones by samples at even distances: weights of two trainings
differ everywhere, and what was put into one of them, as new tokens are, is seen if it is as long as
that distance.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from tl_devicefix.checkpoints.hub import is_checkpoint_directory, snapshot

Files = dict[str, tuple[int, str]]
"""Of each file, its bytes and a checksum of the tensors in it."""

_KINDS = ("config.json", "*.index.json", "*.safetensors", "*.bin")
_SAMPLE, _DISTANCE, _WHOLE = 1 << 12, 1 << 18, 1 << 20
"""Bytes of a sample, from one to the next, and up to which a tensor is compared whole."""


def files_of(name: str, hub: dict[str, Any]) -> Files:
    """The files of a checkpoint that are here: a directory's, or those of the hub's cache."""
    try:
        folder = Path(name) if is_checkpoint_directory(name) else snapshot(name, **hub)
    except ValueError:  # of a hub that cannot be reached, of which transformers tells
        return {}
    paths = [path for kind in _KINDS for path in sorted(folder.glob(kind))]
    return {path.name: _file(str(path), _state(path)) for path in paths}


def differences(files: Files, name: str, hub: dict[str, Any]) -> list[str]:
    """What is wrong with the files here, compared with those of another host."""
    own = files_of(name, hub)
    wrong = [f"has no {file}" for file in files.keys() - own.keys()]
    for file in sorted(files.keys() & own.keys()):
        (nbytes, checksum), (own_nbytes, own_checksum) = files[file], own[file]
        if own_nbytes != nbytes:
            wrong.append(f"has another {file} ({own_nbytes} bytes instead of {nbytes})")
        elif own_checksum != checksum:
            wrong.append(f"has another {file} of the same size")
    return wrong


def _state(path: Path) -> tuple[int, ...]:
    """What changes when a file is written again."""
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns, status.st_ino


@functools.lru_cache(4096)
def _file(path: str, state: tuple[int, ...]) -> tuple[int, str]:
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
    return nbytes, checksum.hexdigest()


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

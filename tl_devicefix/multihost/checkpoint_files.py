"""Compare a checkpoint's files on two hosts, before anything is loaded.

Small tensors are compared whole, large ones by samples at even distances.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from tl_devicefix.checkpoints.hub import is_checkpoint_directory, snapshot

Files = dict[str, tuple[int, str]]
"""File -> its size in bytes, and a checksum of its tensors."""

_FILES = ("config.json", "*.index.json", "*.safetensors", "*.bin")
# Weights of two trainings differ everywhere, so samples suffice. They also find every edit that is
# as long as the distance between them.
_SAMPLE, _DISTANCE, _WHOLE = 1 << 12, 1 << 18, 1 << 20
"""Bytes of a sample, of the distance between samples, and of the largest tensor compared whole."""


def files_of(name: str, hub: dict[str, object]) -> Files:
    """Return a checkpoint's files on this host: a directory's, or those in the hub's cache."""
    try:
        folder = Path(name) if is_checkpoint_directory(name) else snapshot(name, (), **hub)
    except ValueError:  # transformers itself reports a hub that cannot be reached
        return {}
    paths = [path for kind in _FILES for path in sorted(folder.glob(kind))]
    return {path.name: _file(path) for path in paths}


def differences(files: Files, name: str, hub: dict[str, object]) -> list[str]:
    """Return how this host's files of a checkpoint differ from `files`, the driver's."""
    own = files_of(name, hub)
    wrong = [f"has no {file}" for file in sorted(files.keys() - own.keys())]
    # transformers may prefer a file that only this host has. The driver's hub cache may just not
    # have that file yet.
    if is_checkpoint_directory(name):
        wrong += [f"has {file}, which is not here" for file in sorted(own.keys() - files.keys())]
    for file in sorted(files.keys() & own.keys()):
        (nbytes, checksum), (own_nbytes, own_checksum) = files[file], own[file]
        if own_nbytes != nbytes:
            wrong.append(f"has another {file} ({own_nbytes} bytes instead of {nbytes})")
        elif own_checksum != checksum:
            wrong.append(f"has another {file} of the same size")
    return wrong


def _file(path: Path) -> tuple[int, str]:
    nbytes, checksum = path.stat().st_size, hashlib.sha256()
    with path.open("rb") as file:
        if path.suffix == ".safetensors":
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= nbytes - 8:
                raise ValueError(f"{path} is damaged or incomplete: fetch or copy it again")
            header = file.read(length)
            checksum.update(header)
            entries = json.loads(header)
            entries.pop("__metadata__", None)
            spans = [entry["data_offsets"] for entry in entries.values()]
            data = 8 + len(header)  # the offsets count from here
            ranges = [(data + first, data + end) for first, end in spans]
        else:
            # JSON files are small. A `.bin` is a zip file, with checksums at its end.
            ranges = [(0, nbytes), (max(nbytes - _WHOLE, 0), nbytes)]
        for start, end in ranges:
            distance = _SAMPLE if end - start <= _WHOLE else _DISTANCE
            # The last sample is the end of the range, which the steps may miss.
            for first in (*range(start, end, distance), max(start, end - _SAMPLE)):
                checksum.update(os.pread(file.fileno(), min(_SAMPLE, end - first), first))
    return nbytes, checksum.hexdigest()

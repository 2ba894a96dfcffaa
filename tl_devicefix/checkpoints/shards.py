"""The weight files of a local checkpoint: which tensor is where, and whether all are whole."""

from __future__ import annotations

import json
import math
import pickle
import re
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

_INDEX = "model.safetensors.index.json"
_PICKLE_INDEX = "pytorch_model.bin.index.json"


def check_shards(directory: Path) -> None:
    """Check that every weight file is there, is whole, and holds what the index says.

    Of pickled files (`pytorch_model.bin`), only that they are there and not cut short.

    Raises:
        ValueError: naming the file, and a tensor that is missing or cut short.
    """
    index = _index(directory)
    if not index and not _files(directory):
        _check_pickles(directory)
    _check_listed(directory, index)
    for path in _files(directory):
        header, file = _read_header(path), path.name
        listed = {tensor for tensor, where in index.items() if where == file}
        if index and header.keys() != listed:
            tensor = min(header.keys() ^ listed)
            here, there = ("the file", "index") if tensor in header else ("the index", "file")
            raise ValueError(
                f"the checkpoint {str(directory)!r} does not agree with its index: {tensor} of "
                f"{file} is in {here} and not in the {there}; fetch it again"
            )


def _check_listed(directory: Path, index: dict[str, str]) -> None:
    for tensor, file in sorted(index.items()):
        if not (directory / file).is_file():
            raise ValueError(
                f"the checkpoint {str(directory)!r} lists {tensor} in {file}, but that file is not "
                "there; fetch it again"
            )


def _check_pickles(directory: Path) -> None:
    index = _index(directory, _PICKLE_INDEX)
    _check_listed(directory, index)
    for file in _pickles(directory):
        try:
            _unpickled(file)
        except _DAMAGED_PICKLE as error:
            # Around it, torch says how to unpickle it all the same.
            reason = " ".join(str(error.__context__ or error).split())
            if (called := re.search(r"GLOBAL (\w[\w.]*)", reason)) is not None:
                raise ValueError(
                    f"{file} would run {called[1]} when it is unpickled, which no weights need, so "
                    "it was not read: do not use this checkpoint, or have whoever made it save it "
                    "as safetensors"
                ) from error
            raise ValueError(
                f"{file} cannot be unpickled, perhaps as it is cut short at "
                f"{file.stat().st_size} bytes ({reason}){_listed_in(file, index)}; fetch it again"
            ) from error


def _unpickled(file: Path) -> Mapping[str, torch.Tensor]:
    """The tensors of a pickled file, without their values."""
    with file.open("rb") as opened:
        is_zip = opened.read(2) == b"PK"
    # A zip file's table of contents is at its end. Before torch 1.6 they were no zip files.
    if file.stat().st_size == 0 or (is_zip and not zipfile.is_zipfile(file)):
        raise ValueError("it has no end")
    held = torch.load(file, map_location="meta", weights_only=True, mmap=is_zip)
    values = held.items() if isinstance(held, Mapping) else [("", held)]
    for name, value in values:
        if not isinstance(value, torch.Tensor) or not isinstance(name, str) or not name:
            raise ValueError(f"it holds a {type(value).__name__} by {name!r}, not tensors by name")
    return held


def _listed_in(file: Path, index: dict[str, str]) -> str:
    """The tensors that an index lists in a file, as the end of a clause; "" if it lists none."""
    listed = sorted(tensor for tensor, where in index.items() if where == file.name)
    more = f" and {len(listed) - 1} more" if listed[1:] else ""
    return f"; it should hold {listed[0]}{more}" if listed else ""


# What unpickling raises, depending on where the bytes end or are wrong.
_DAMAGED_PICKLE = (
    OSError, RuntimeError, ValueError, EOFError, LookupError, TypeError, AttributeError,
    pickle.UnpicklingError, struct.error,
)  # fmt: skip


def stored_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor in a local checkpoint's weight files."""
    return {name: shape for shapes in _shapes_by_file(directory).values() for name, shape in shapes}


def file_of(directory: Path, tensor: str) -> str | None:
    """The file of a local checkpoint that holds a tensor, or by its index should."""
    index = _index(directory) or _index(directory, _PICKLE_INDEX)
    if tensor in index:
        return index[tensor]
    held = _shapes_by_file(directory)
    if len(held) == 1:
        return next(iter(held))
    return next((file for file, shapes in held.items() if tensor in dict(shapes)), None)


def _shapes_by_file(directory: Path) -> dict[str, list[tuple[str, tuple[int, ...]]]]:
    """The name and shape of each tensor, by the name of the file that it is in."""
    files = _files(directory)
    if not files:
        return {
            file.name: [(name, tuple(tensor.shape)) for name, tensor in _unpickled(file).items()]
            for file in _pickles(directory)
        }
    return {
        file.name: [(name, tuple(entry["shape"])) for name, entry in _read_header(file).items()]
        for file in files
    }


def _files(directory: Path) -> list[Path]:
    """The safetensors files that transformers reads: those of the index, or the only one."""
    names = sorted(set(_index(directory).values())) or ["model.safetensors"]
    return [directory / name for name in names if (directory / name).is_file()]


def _pickles(directory: Path) -> list[Path]:
    names = sorted(set(_index(directory, _PICKLE_INDEX).values())) or ["pytorch_model.bin"]
    return [directory / name for name in names if (directory / name).is_file()]


def _index(directory: Path, name: str = _INDEX) -> dict[str, str]:
    """Which file of a sharded checkpoint holds which tensor; empty if it is not sharded."""
    index = directory / name
    if not index.is_file():
        return {}
    try:
        weight_map = dict(json.loads(index.read_text())["weight_map"].items())
        if not weight_map or any(Path(file).name != file for file in weight_map.values()):
            raise ValueError("it does not list tensors and the files here that they are in")
        return weight_map
    except _NOT_AS_WRITTEN as error:
        raise ValueError(f"{index} cannot be read ({error!r}); fetch it again") from error


# What JSON, and what is made of it, raise if it is damaged; the last if it is nested too deep.
_NOT_AS_WRITTEN = (ValueError, LookupError, TypeError, AttributeError, RecursionError)


def _read_header(file: Path) -> dict[str, Any]:
    """What a safetensors file holds, by its header (8 bytes of length, JSON, then the data).

    Raises:
        ValueError: if the file is shorter than its header says.
    """
    size = file.stat().st_size
    with file.open("rb") as opened:
        header_size = int.from_bytes(opened.read(8), "little")
        if size < 8 or header_size > size - 8:
            raise ValueError(
                f"{file} is cut short within its header ({size} bytes); fetch it again"
            )
        try:
            header = json.loads(opened.read(header_size))
            header.pop("__metadata__", None)
        except _NOT_AS_WRITTEN as error:
            raise ValueError(
                f"the header of {file} is damaged ({error!r}); fetch it again"
            ) from error
    for name, entry in header.items():
        _check_entry(file, name, entry, 8 + header_size, size)
    return header


def _check_entry(file: Path, name: str, entry: Any, start: int, size: int) -> None:
    """Check that a tensor's shape, type and place in a safetensors file agree."""
    try:
        begin, end = map(int, entry["data_offsets"])
        n_bits = math.prod(entry["shape"]) * _bits(entry["dtype"])
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"the header of {file} is damaged at {name} ({error!r}); fetch it again"
        ) from error
    if start + end > size:
        raise ValueError(
            f"{file} is cut short: {name} should end at byte {start + end}, but the file has "
            f"{size}; fetch it again"
        )
    if 8 * (end - begin) != n_bits:
        raise ValueError(
            f"the header of {file} is damaged: {name} has shape {entry['shape']} and type "
            f"{entry['dtype']}, but {end - begin} bytes; fetch it again"
        )


def _bits(dtype: str) -> int:
    """The size of an element of a safetensors type ("BF16", "F8_E4M3", "U8", "BOOL")."""
    return 8 if dtype == "BOOL" else int(re.fullmatch(r"[A-Z]+(\d+)(_\w+)?", dtype)[1])  # type: ignore[index]

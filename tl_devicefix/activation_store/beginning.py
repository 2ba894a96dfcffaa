"""What is looked at before anything is written: who else writes there, what is there, disk room."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib.metadata
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import torch

from tl_devicefix.activation_store.format import (
    INDEX,
    SHARDS,
    TEMPORARY,
    Index,
    read_index,
    shard_name,
)
from tl_devicefix.monkeypatch.versions import installed
from tl_devicefix.placement.tables import gib

LOCK = ".tl_devicefix.lock"
_OURS = re.compile(rb"[0-9a-f]{0,32}")
"""What we write in it."""

SHAPES = ("n_layers", "d_model", "n_heads", "n_key_value_heads", "d_head", "d_mlp", "d_vocab")
"""Fields of a config that say what shapes a model's activations have."""


@contextlib.contextmanager
def alone_in(directory: Path) -> Iterator[str]:
    """Within it, no other process harvests to a directory, which is made.

    Yields:
        What is in the file `LOCK` meanwhile, and is nowhere else.

    Raises:
        NotADirectoryError: if it is a file.
        FileExistsError: if the file `LOCK` is somebody's own, which is left as it is.
        RuntimeError: if another one does.
    """
    if directory.is_file():
        raise NotADirectoryError(f"{directory} is a file: give a directory to harvest to")
    directory.mkdir(parents=True, exist_ok=True)
    with _opened(directory / LOCK) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.fstat(file.fileno()).st_nlink:  # another one ended just now, and removed it
                raise BlockingIOError
        except BlockingIOError:
            raise RuntimeError(
                f"someone else is harvesting to {directory}: wait until that has ended, or give "
                "another directory"
            ) from None
        try:
            if not _OURS.fullmatch(file.read(33)):
                raise _not_ours(directory / LOCK)
            file.seek(0)
            file.write((text := uuid.uuid4().hex).encode())
            file.flush()
            os.fsync(file.fileno())
            yield text
        finally:  # not by closing: a DataLoader's worker may have the file open for longer
            fcntl.flock(file, fcntl.LOCK_UN)


def _opened(path: Path) -> BinaryIO:
    """A file that is made if it is not there, and not changed."""

    def open_here(path: str, flags: int) -> int:
        return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW, 0o666)

    try:
        return open(path, "rb+", opener=open_here)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR):
            raise _not_ours(path) from None
        raise


def _not_ours(path: Path) -> FileExistsError:
    return FileExistsError(
        f"{path}, by which other harvests are kept out, is not a file of tl_devicefix: take it "
        "away, or give another directory"
    )


def what_is_there(directory: Path, resume: bool) -> Index | None:
    """The index of a harvest that is gone on with, if one was begun: without shards that are gone.

    Raises:
        FileExistsError: if something is there that is not to be gone on with.
        FileNotFoundError: if others than the last shards are gone, or all are.
    """
    if not (directory / INDEX).exists():
        if (directory / shard_name(0)).exists() and not resume:
            raise FileExistsError(
                f"{directory} has a {shard_name(0)} and no {INDEX}: give another directory, or "
                "resume=True to write over it"
            )
        return None
    index = read_index(directory)
    if not index.shards:
        return None  # nothing is lost
    if not resume:
        raise FileExistsError(
            f"{directory} has a harvest of {index.n_examples} examples already, of "
            f"{index.model.get('name')}: pass resume=True to go on with it, or give another "
            "directory"
        )
    there = [(directory / each.file).is_file() for each in index.shards]
    if all(there):
        return index
    first = there.index(False)
    if not first or any(there[first:]):  # what is there would be written over, or be lost
        more = f", delete those after {index.shards[first].file} too" if first else ""
        raise FileNotFoundError(
            f"{directory / index.shards[first].file} is missing: put it back{more}, or harvest to "
            "another directory; resume=True harvests the last shards again, not those before others"
        )
    return replace(index, shards=index.shards[:first], is_complete=False)


def leave_nothing_empty(directory: Path, is_new: bool) -> None:
    """Remove the lock of a directory in which no harvest was begun, and the directory if it is new.

    Call it with the lock held.
    """
    if not (directory / INDEX).exists():
        (directory / LOCK).unlink(missing_ok=True)
        if is_new:
            with contextlib.suppress(OSError):  # somebody has put something there
                directory.rmdir()


def clear_away(directory: Path) -> None:
    """Remove what a process that was killed has not finished."""
    for name in (INDEX, SHARDS):
        for part in directory.glob(name + TEMPORARY):
            part.unlink()


def model_fields(model: Any) -> dict[str, Any]:
    """A model's name, class and shapes, as an index has them."""
    config = model.cfg
    return {
        "name": str(getattr(config, "model_name", "")),
        "class": type(model).__name__,
        "dtype": str(getattr(config, "dtype", "")).removeprefix("torch."),
        **{name: getattr(config, name, None) for name in SHAPES},
    }


def versions() -> dict[str, str]:
    """The versions of what writes a harvest."""
    try:
        own = importlib.metadata.version("tl_devicefix")
    except importlib.metadata.PackageNotFoundError:  # imported from where its source lies
        own = "not installed"
    return {
        "tl_devicefix": own,
        "transformer_lens": str(installed()),
        "torch": str(torch.__version__),
    }


def check_room(directory: Path, needed: int) -> None:
    """Check that the disk has room.

    Raises:
        OSError: if it has not.
    """
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise OSError(
            errno.ENOSPC,
            f"the harvest takes {gib(needed)} more, but the disk of {directory} has {gib(free)} "
            "free: keep fewer names or tokens, reduce them, or give a directory on another disk",
        )

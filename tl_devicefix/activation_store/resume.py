"""What is in a directory before anything is written to it, and whether saving may go on with it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib.metadata
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tl_devicefix.activation_store.format import (
    INDEX,
    SHARDS,
    TEMPORARY,
    TOKEN_MASK,
    Index,
    read_index,
    same_bytes,
    shard_name,
)
from tl_devicefix.activation_store.shards import Shards, Stored
from tl_devicefix.monkeypatch.versions import installed
from tl_devicefix.placement.memory import gib

LOCK = ".tl_devicefix.lock"
_SHAPES = ("n_layers", "d_model", "n_heads", "n_key_value_heads", "d_head", "d_mlp", "d_vocab")
"""Fields of a config that say what shapes a model's activations have."""


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Within it, no other process saves to a directory, which is made.

    Nothing is left of a new directory if no index was written.

    Raises:
        NotADirectoryError: if it is a file.
        RuntimeError: if another process saves to it.
    """
    if directory.is_file():
        raise NotADirectoryError(f"{directory} is a file: give a directory")
    is_new = not directory.exists()
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / LOCK, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.fstat(file.fileno()).st_nlink:  # another one ended just now, and removed it
                raise BlockingIOError
        except BlockingIOError:
            raise RuntimeError(
                f"another process is saving activations to {directory}: wait until it has ended, "
                "or give another directory"
            ) from None
        try:
            yield
        finally:
            if is_new and not (directory / INDEX).exists():
                (directory / LOCK).unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # somebody has put something there
                    directory.rmdir()
            # Not by closing: a DataLoader's worker may have the file open for longer.
            fcntl.flock(file, fcntl.LOCK_UN)


def saved_index(directory: Path, resume: bool) -> Index | None:
    """The index of activations that were saved before, if any, without last shards that are gone.

    Raises:
        FileExistsError: if there are some, and `resume` is False.
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
            f"{directory} has activations of {index.n_examples} examples already, of "
            f"{index.model.get('name')}: pass resume=True to go on, or give another directory"
        )
    exists = [(directory / shard.file).is_file() for shard in index.shards]
    if all(exists):
        return index
    first = exists.index(False)
    if not first or any(exists[first:]):  # later shards would be written over, or be lost
        more = f", delete those after {index.shards[first].file} too" if first else ""
        raise FileNotFoundError(
            f"{directory / index.shards[first].file} is missing: put it back{more}, or save to "
            "another directory; resume=True computes the last shards again, not those before others"
        )
    return replace(index, shards=index.shards[:first], is_complete=False)


def remove_temporary(directory: Path) -> None:
    """Remove what a process that was killed has not finished."""
    for name in (INDEX, SHARDS):
        for part in directory.glob(name + TEMPORARY):
            part.unlink()


def check_disk(directory: Path, needed: int) -> None:
    """Check that the disk has so many bytes free.

    Raises:
        OSError: if it does not.
    """
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise OSError(
            errno.ENOSPC,
            f"the activations take {gib(needed)} more, but the disk of {directory} has {gib(free)} "
            "free: save fewer names or tokens, give a transform, or a directory on another disk",
        )


def model_fields(model: Any) -> dict[str, Any]:
    """A model's name, class and shapes, as an index has them."""
    config = model.cfg
    return {
        "name": str(getattr(config, "model_name", "")),
        "class": type(model).__name__,
        "dtype": str(getattr(config, "dtype", "")).removeprefix("torch."),
        **{name: getattr(config, name, None) for name in _SHAPES},
    }


def versions() -> dict[str, str]:
    """The versions of the packages that compute and write."""
    try:
        own = importlib.metadata.version("tl_devicefix")
    except importlib.metadata.PackageNotFoundError:  # imported from where its source lies
        own = "not installed"
    return {
        "tl_devicefix": own,
        "transformer_lens": str(installed()),
        "torch": str(torch.__version__),
    }


class Saved:
    """Activations on disk, to be compared with those that would be saved now.

    Args:
        directory: where they are.
        index: of them.
    """

    def __init__(self, directory: Path, index: Index) -> None:
        self._directory, self._index = directory, index
        shards = Shards(directory, index)
        self._stored = {entry.name: Stored(shards, entry) for entry in index.entries}

    def compare_index(self, index: Index) -> None:
        """Compare the index with the one that would be written now.

        Raises:
            ValueError: naming what differs first.
        """
        difference = next(_differences(self._index, index), None)
        if difference is not None:
            raise self._other(f"{difference}; go on as they were begun")

    def compare_activations(self, activations: Mapping[str, torch.Tensor]) -> None:
        """Compare the first batch's activations with those that the model computes now.

        Raises:
            ValueError: naming those that differ.
        """
        for name, computed in activations.items():
            stored = self._stored[name].of_shard(0)
            if self._stored[name].entry.axis != "shared":
                n_rows = min(len(stored), len(computed))
                stored, computed = stored[:n_rows], computed[:n_rows]
            if not same_bytes(stored, computed.cpu()):
                raise self._other(
                    f"the model computes another {name} of the first batch now, so its weights, "
                    f"hooks, devices or transform have changed, or {self._damaged}"
                )

    def compare_tokens(self, beside: Mapping[str, torch.Tensor], start: int, count: int) -> None:
        """Compare tokens and masks of examples on disk with those of a batch.

        Args:
            beside: by name, those of the batch.
            start: the number of its first example.
            count: how many of its examples are on disk.

        Raises:
            ValueError: naming those that differ.
        """
        for name, rows in beside.items():
            stored = self._stored[name][start : start + count] if count else rows[:0]
            if not torch.equal(stored, rows[:count]):
                other = "another token_mask" if name == TOKEN_MASK else f"other {name}"
                raise self.other_data(
                    f"from example {start} on, batches has {other}, unless {self._damaged}"
                )

    @property
    def _damaged(self) -> str:
        command = f"python -m tl_devicefix activations verify {self._directory}"
        return f"a shard is damaged: see `{command}`"

    def other_data(self, difference: str) -> ValueError:
        """The error for batches that are not those that saving was begun with."""
        return self._other(f"{difference}; give the batches that saving was begun with")

    def _other(self, difference: str) -> ValueError:
        return ValueError(
            f"the activations in {self._directory} are not those of this call: {difference}, or "
            "give another directory"
        )


def _differences(stored: Index, index: Index) -> Iterator[str]:
    old, new = ({entry.name: entry for entry in each.entries} for each in (stored, index))
    if (TOKEN_MASK in old) != (TOKEN_MASK in new):
        yield f"they were saved with{'' if TOKEN_MASK in old else 'out'} token_mask"
    theirs, ours = _fields(stored), _fields(index)
    for field in theirs:
        if field != _PER_SHARD and theirs[field] != ours.get(field, theirs[field]):
            yield f"{field} is {theirs[field]!r} on disk, not {ours[field]!r}"
    yield from (f"they have {n}, which names_filter leaves out" for n in old if n not in new)
    yield from (f"they have no {n}" for n in new if n not in old)
    if theirs[_PER_SHARD] != ours[_PER_SHARD]:
        yield f"{_PER_SHARD} is {theirs[_PER_SHARD]} on disk, not {ours[_PER_SHARD]}"


_PER_SHARD = "the number of examples in a shard, by shard_size,"


def _fields(index: Index) -> dict[str, Any]:
    """What must not change, by what a message calls it."""
    return {
        **{f"the model's {name}": value for name, value in index.model.items()},
        **{f"the version of {name}": value for name, value in index.made_by.items()},
        **{
            f"the {field} of {entry.name}": getattr(entry, field)
            for entry in index.entries
            for field in ("dtype", "shape", "axis", "same_as")
        },
        _PER_SHARD: index.examples_per_shard,
    }

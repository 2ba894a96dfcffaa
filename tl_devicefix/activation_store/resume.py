"""Check a directory before anything is written, and whether a save may continue there."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from tl_devicefix.activation_store.format import INDEX, Index, read_index, shard_name
from tl_devicefix.activation_store.reader import SavedActivations
from tl_devicefix.placement.memory import gib
from tl_devicefix.types import Model

LOCK = ".tl_devicefix.lock"
_FIELDS = (
    # The shapes of a model's activations.
    *("n_layers", "d_model", "n_heads", "n_key_value_heads", "d_head", "d_mlp", "d_vocab"),
    "normalization_type",  # "LNPre" if norms are folded, which changes activations
)


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Make a directory, and lock it against other processes within a `with` block."""
    import fcntl  # not on Windows; reading needs no lock

    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / LOCK, "ab") as file:
        try:
            # Do not wait: the other process may save for hours.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(
                f"another process is saving activations to {directory}: wait until it has ended, "
                "or give another directory"
            ) from None
        try:
            yield
        finally:
            # Closing may not unlock: a forked DataLoader worker has the file open too.
            fcntl.flock(file, fcntl.LOCK_UN)


def saved_index(directory: Path, resume: bool) -> Index | None:
    """Return the index on disk, without missing shards at its end; None if it has no shards.

    Raises an error if saving cannot continue there.
    """
    if not (directory / INDEX).exists():
        if (directory / shard_name(0)).exists():  # saving would overwrite it
            raise FileExistsError(
                f"{directory} has a {shard_name(0)}, but no {INDEX}: put the {INDEX} back, or give "
                "another directory"
            )
        return None
    index = read_index(directory)
    if not index.shards:
        return None  # nothing is lost
    if not resume:
        raise FileExistsError(
            f"{directory} has activations of {index.n_examples} examples already, of "
            f"{index.model.get('name')}: repeat that call with resume=True to save the rest, or "
            "give another directory"
        )
    exists = [(directory / shard.file).is_file() for shard in index.shards]
    if all(exists):
        return index
    first = exists.index(False)
    if not first or any(exists[first:]):  # later shards would be lost
        more = f", or delete those after {index.shards[first].file} too" if first else ""
        raise FileNotFoundError(
            f"{directory / index.shards[first].file} is missing, and resume=True computes only the "
            f"last shards again: put it back{more}, or give another directory"
        )
    return replace(index, shards=index.shards[:first], is_complete=False)


def check_disk(directory: Path, needed: int) -> None:
    """Refuse a disk with fewer than `needed` bytes free."""
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise OSError(
            errno.ENOSPC,
            f"the activations need {gib(needed)}, but the disk of {directory} has only {gib(free)} "
            "free: save fewer names or tokens, give a transform, or use another disk",
        )


def model_fields(model: Model) -> dict[str, object]:
    """Return a model's name, class and shapes for the index."""
    config = model.cfg
    return {
        "name": str(getattr(config, "model_name", "")),
        "class": type(model).__name__,
        "dtype": str(getattr(config, "dtype", "")).removeprefix("torch."),
        **{name: getattr(config, name, None) for name in _FIELDS},
    }


class Saved(SavedActivations):
    """Activations on disk, with methods to compare their index and tokens with this call's.

    The `compare_` methods raise a ValueError that names the first difference.
    """

    def compare_index(self, index: Index) -> None:
        """Compare the saved index with the one of this call."""
        before, now = _fields(self.index), _fields(index)
        for field in {**before, **now}:
            if before.get(field) != now.get(field):
                raise self.differing(
                    f"{field} is {before.get(field, 'not saved')} on disk, but "
                    f"{now.get(field, 'not saved')} in this call"
                )

    def compare_tokens(self, beside: Mapping[str, torch.Tensor], start: int, count: int) -> None:
        """Compare a batch's first `count` rows of tokens and masks with those on disk."""
        for name, rows in beside.items() if count else ():
            if not torch.equal(self.stored[name][start : start + count], rows[:count]):
                raise self.differing(
                    f"from example {start} on, batches has other values of {name}, or a shard is "
                    "damaged (load_activations(directory).verify() finds it)"
                )

    def differing(self, difference: str) -> ValueError:
        """Return the error for a call that differs from the one on disk."""
        return ValueError(
            f"the activations in {self.directory} are not those of this call: {difference}; repeat "
            "the first call's model, arguments, batches and versions, or give another directory"
        )


def _fields(index: Index) -> dict[str, str]:
    """Return the values that must not change, by their names in messages."""
    return {
        **{f"the model's {name}": str(value) for name, value in index.model.items()},
        **{f"the version of {name}": version for name, version in index.made_by.items()},
        **{entry.name: str(entry) for entry in index.entries},
    }

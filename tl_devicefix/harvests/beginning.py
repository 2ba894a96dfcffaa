"""What is looked at before anything is written: who else writes there, what is there, disk room."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib.metadata
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from tl_devicefix.harvests.format import (
    INDEX,
    TEMPORARY,
    Entry,
    Index,
    read_index,
    same_bytes,
    shard_name,
)
from tl_devicefix.harvests.stored import Stored
from tl_devicefix.patching.versions import installed
from tl_devicefix.placement.memory import gib

LOCK = "lock"

SHAPES = ("n_layers", "d_model", "n_heads", "n_key_value_heads", "d_head", "d_mlp", "d_vocab")
"""Fields of a config that say what shapes a model's activations have."""


@contextlib.contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """Within it, no other process harvests to a directory, which is made.

    Raises:
        RuntimeError: if another one does.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(
                f"someone else is harvesting to {directory}: wait until that has ended, or give "
                "another directory"
            ) from None
        yield


def what_is_there(directory: Path, resume: bool) -> Index | None:
    """The index of a harvest that is gone on with, if one was begun.

    Raises:
        FileExistsError: if something is there that is not to be gone on with.
    """
    if not (directory / INDEX).exists():
        if (directory / shard_name(0)).exists() and not resume:
            raise FileExistsError(
                f"{directory} has a {shard_name(0)} and no {INDEX}: give another directory, or "
                "resume=True to write over it"
            )
        return None
    index = read_index(directory)
    if not resume:
        raise FileExistsError(
            f"{directory} has a harvest of {index.n_examples} examples already: pass resume=True "
            "to go on with it, or give another directory"
        )
    return index


def clear_away(directory: Path) -> None:
    """Remove what a process that was killed has not finished."""
    for part in directory.glob(f"*{TEMPORARY}"):
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
    return {
        "tl_devicefix": importlib.metadata.version("tl_devicefix"),
        "transformer_lens": str(installed()),
        "torch": str(torch.__version__),
    }


def refuse_other(directory: Path, known: Index, index: Index) -> None:
    """Refuse to go on with a harvest of something else.

    Args:
        directory: where it is.
        known: what it has.
        index: what would be written now.

    Raises:
        ValueError: naming what differs first.
    """
    found = next(_differences(known, index), None)
    if found is not None:
        raise ValueError(
            f"the harvest in {directory} is another one: {found}; go on as it was begun, or "
            "harvest to another directory"
        )


def _differences(known: Index, index: Index) -> Iterator[str]:
    for what, theirs, ours in (
        ("its model's", known.model, index.model),
        ("its version of", known.made_by, index.made_by),
    ):
        for name in {**theirs, **ours}:
            if theirs.get(name) != ours.get(name):
                yield f"{what} {name} is {theirs.get(name)!r}, not {ours.get(name)!r}"
    there, here = ({e.name: e for e in each.entries} for each in (known, index))
    if there.keys() != here.keys():
        yield from (f"it has {name}, which names_filter leaves out" for name in there - here.keys())
        yield from (f"it has no {name}" for name in here.keys() - there)
    for name, entry in there.items():
        yield from _differences_of(entry, here[name])
    if known.examples_per_shard != index.examples_per_shard:
        yield (
            f"its shards have {known.examples_per_shard} examples, but with this shard_size they "
            f"would have {index.examples_per_shard}"
        )


def _differences_of(theirs: Entry, ours: Entry) -> Iterator[str]:
    for field in ("dtype", "shape", "axis", "same_as"):
        if (there := getattr(theirs, field)) != (here := getattr(ours, field)):
            yield f"the {field} of {theirs.name} there is {there}, not {here}"


def check_first(directory: Path, index: Index, found: Mapping[str, torch.Tensor]) -> None:
    """Check that the first batch gives now what was stored of it.

    Args:
        directory: of the harvest.
        index: what it has.
        found: by name, rows of the first batch.

    Raises:
        ValueError: naming what differs.
    """
    if not index.shards:
        return
    for entry in index.entries:
        if entry.same_as is None:
            there = Stored(directory, index, entry).of_shard(0)
            here = found[entry.name]
            if entry.axis != "shared":
                n_rows = min(len(there), len(here))
                there, here = there[:n_rows], here[:n_rows]
            if not same_bytes(there, here.cpu()):
                raise ValueError(
                    f"the harvest in {directory} is another one: {entry.name} of its first batch is"
                    " not what this model gives now, so its weights, hooks, devices, data, reduce "
                    "or keep are others; go on as it was begun, or harvest to another directory"
                )


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

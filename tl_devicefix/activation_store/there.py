"""What is on disk of a harvest that goes on, beside what would be written now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from tl_devicefix.activation_store.format import KEPT, Entry, Index, same_bytes
from tl_devicefix.activation_store.stored import Shards, Stored


class There:
    """What is there already.

    Args:
        directory: of the harvest.
        index: what it has.
    """

    def __init__(self, directory: Path, index: Index) -> None:
        self._directory, self._index = directory, index
        shards = Shards(directory, index)
        self._stored = {each.name: Stored(shards, each) for each in index.entries}

    def refuse_other(self, index: Index) -> None:
        """Refuse to go on with a harvest of something else.

        Args:
            index: what would be written now.

        Raises:
            ValueError: naming what differs first.
        """
        found = next(_differences(self._index, index), None)
        if found is not None:
            raise ValueError(
                f"the harvest in {self._directory} is another one: {found}; go on as it was begun, "
                "or harvest to another directory"
            )

    def check_first(self, found: Mapping[str, torch.Tensor]) -> None:
        """Check that the first batch gives now what was stored of it.

        Args:
            found: by name, its activations.

        Raises:
            ValueError: naming what differs.
        """
        for name, here in found.items():
            there = self._stored[name].of_shard(0)
            if self._stored[name].entry.axis != "shared":
                n_rows = min(len(there), len(here))
                there, here = there[:n_rows], here[:n_rows]
            if not same_bytes(there, here.cpu()):
                raise ValueError(
                    f"the harvest in {self._directory} is another one: {name} of its first "
                    "batch is not what this model gives now, so its weights, hooks, devices or "
                    "transform are others, or a shard is damaged, which `python -m tl_devicefix "
                    f"harvest verify {self._directory}` says; go on as it was begun, or harvest to "
                    "another directory"
                )

    def compare(self, beside: Mapping[str, torch.Tensor], start: int, count: int) -> None:
        """Compare tokens and masks of examples that are written with what they would be now.

        Args:
            beside: by name, those of a batch.
            start: the number of its first example.
            count: how many of them are written.

        Raises:
            ValueError: naming what differs.
        """
        for name, rows in beside.items():
            written = self._stored[name][start : start + count] if count else rows[:0]
            if not torch.equal(written, rows[:count]):
                raise self.other_data(
                    f"has other {name} from example {start} on than batches has, unless a shard is "
                    f"damaged: see `python -m tl_devicefix activations verify {self._directory}`"
                )

    def other_data(self, what: str) -> ValueError:
        """The error for data that is another."""
        return ValueError(
            f"the harvest in {self._directory} {what}: go on with the data that it was begun with,"
            " or harvest to another directory"
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
    if (KEPT in there) != (KEPT in here):
        yield f"it was begun with{'' if KEPT in there else 'out'} token_mask"
    yield from (
        f"it has {name}, which names_filter leaves out" for name in there if name not in here
    )
    yield from (f"it has no {name}" for name in here if name not in there)
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

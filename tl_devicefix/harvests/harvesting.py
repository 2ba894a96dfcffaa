"""`harvest`: the activations of many batches, written while the next ones are computed."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.utils import convert_file_size_to_int

from tl_devicefix.flights.flying import devices_of, in_flight
from tl_devicefix.flights.viewing import viewing
from tl_devicefix.harvests import beginning
from tl_devicefix.harvests.batches import Batch, Batches
from tl_devicefix.harvests.copying import Buffer, Ring, by_device, room_for
from tl_devicefix.harvests.format import KEPT, MASK, TOKENS, Entry, Index, write_index
from tl_devicefix.harvests.keeping import Found, Keep, Keeping, Reduce, entries_of
from tl_devicefix.harvests.progress import Bar
from tl_devicefix.harvests.reading import Harvest, open_harvest
from tl_devicefix.harvests.stored import Stored
from tl_devicefix.harvests.writing import Copied, Writer


def harvest(
    model: Any,
    batches: Iterable[Any],
    names_filter: Any = None,
    *,
    to: str | os.PathLike[str],
    batch_size: int = 8,
    prepend_bos: bool | None = None,
    dtype: torch.dtype | None = None,
    reduce: Reduce | Mapping[str, Reduce] | None = None,
    keep: Keep | None = None,
    resume: bool = False,
    shard_size: int | str = "512MiB",
    at_once: int | None = None,
    progress: bool = True,
    **arguments: Any,
) -> Harvest:
    """Run a model on batches, and write activations to a directory while the next batch is run.

    Activations are copied to host memory on a stream of their own, and written by a thread. When
    the disk is slower than the devices, the devices wait: host memory holds two shards and some
    batches, however many there are. Over several devices, runs are in flight (`in_flight`).

    A harvest that ended early, in whatever way, is whole as far as its index says; the same call
    with ``resume=True`` goes on, and ends with the same bytes. It runs the first batch again, and
    then those that are not written, and reads `batches` from the beginning to compare the tokens.

    Args:
        model: a HookedTransformer or TransformerBridge, on any number of devices.
        batches: each is tokens `[batch, pos]`, a list of texts, or a dict with "tokens" or
            "input_ids" and, if there is padding, "attention_mask", as a DataLoader yields them. Or
            examples, of which batches are made: tokens `[pos]`, texts, or dicts of those, as a
            `datasets.Dataset` yields them. All have as many tokens.
        names_filter: which activations, as `run_with_cache` takes it.
        to: a directory, which is made.
        batch_size: how many examples make a batch.
        prepend_bos: for texts, as the model's forward takes it.
        dtype: to which activations are converted on their device. By default as they are computed,
            bit for bit.
        reduce: a function of an activation, called on its device: what it returns, `[batch, ...]`,
            is stored in its place. Or a dict from names to such functions.
        keep: which tokens' activations are stored: a function of tokens `[batch, pos]` (on the CPU)
            that returns booleans of that shape, or "attention_mask" for all but padding.
        resume: go on with what is there, if anything is.
        shard_size: bytes of a file, or "512MiB": a shard has as many examples as fit, at least one.
        at_once: how many runs are in flight; see `in_flight`.
        progress: show a bar with examples, tokens and bytes a second.
        arguments: of the forward, as `stop_at_layer`.

    Returns:
        What was written, as `open_harvest` opens it.

    Raises:
        TypeError: for a model of neither class, an item that is no batch, or arguments that would
            change what a run leaves behind.
        ValueError: for batches of different widths; nothing that is kept; what cannot be stored;
            and, with `resume`, another model, filter, dtype or data than what is there: named.
        FileExistsError: if a harvest is there, without `resume`.
        RuntimeError: if someone else harvests to the directory.
        OSError: if the disk has not the room, before anything is written; or is full.
    """
    for name in ("attention_mask", "fwd_hooks", "return_cache_object", "incl_bwd", "pos_slice"):
        if name in arguments:
            raise TypeError(f"harvest() takes no {name}: {_INSTEAD[name]}")
    viewing(model)  # refuses what is no model
    directory = Path(to)
    source = Batches(batches, model, batch_size, prepend_bos)
    keeping = Keeping(names_filter, dtype, reduce, keep)
    shard_bytes = _size(shard_size)
    with contextlib.ExitStack() as stack:
        if not resume:
            beginning.what_is_there(directory, resume)  # before a directory is made
        stack.enter_context(beginning.alone_in(directory))
        stack.enter_context(torch.no_grad())
        known = beginning.what_is_there(directory, resume)
        beginning.clear_away(directory)
        harvesting = _Harvesting(model, source, keeping, arguments, directory, at_once)
        harvesting.begin(known, shard_bytes)
        harvesting.run(progress)
    return open_harvest(directory)


_INSTEAD = {
    "attention_mask": "give batches that are dicts with one",
    "fwd_hooks": "add hooks to the model before",
    "return_cache_object": "nothing of a cache is returned",
    "incl_bwd": "gradients are not harvested",
    "pos_slice": "give a reduce, such as lambda activation: activation[:, -1]",
}


def _size(size: int | str) -> int:
    try:
        found = int(convert_file_size_to_int(size))
    except (ValueError, AttributeError, TypeError):
        found = 0
    if found < 1:
        raise ValueError(f"shard_size={size!r} is no size: give bytes, or a text as '512MiB'")
    return found


class _Item(NamedTuple):
    """A batch that is run, where what is kept of it goes to, and how much of it is written."""

    batch: Batch
    kept: torch.Tensor | None
    skip: int
    buffer: Buffer


@dataclass
class _First:
    """The first batch, which is run before anything is known of the others."""

    batch: Batch
    kept: torch.Tensor | None
    found: Found | None


class _Harvesting:
    """One call of `harvest`."""

    def __init__(
        self,
        model: Any,
        source: Batches,
        keeping: Keeping,
        arguments: dict[str, Any],
        directory: Path,
        at_once: int | None,
    ) -> None:
        self._model, self._source, self._keeping = model, source, keeping
        self._arguments, self._directory = arguments, directory
        self._devices = devices_of(model)
        n_devices = len(self._devices)
        self._at_once = at_once if at_once is not None else n_devices + (n_devices > 1)
        self._batches = iter(source)
        self._points = dict(model.hook_dict)

    def begin(self, known: Index | None, shard_bytes: int) -> None:
        """Run the first batch, and see of it whether all the rest can be done.

        Raises:
            ValueError, OSError: if it cannot be; nothing is written then.
        """
        batch = next(self._batches, None)
        if batch is None:
            raise ValueError("there is nothing to harvest: batches has none")
        kept = self._keeping.tokens_of(batch.tokens, batch.mask)
        (found,) = in_flight(self._model, self._of_forward, [(batch, kept)], at_once=1)
        self._names, self._groups = found.names, by_device(found.tensors)
        self._first = _First(batch, kept, found)
        self._width = batch.tokens.shape[1]
        beside = _beside(batch, kept)
        n_rows = len(batch.tokens) if kept is None else int(kept.sum())
        entries = entries_of(found, n_rows, kept is not None)
        self._entries = {entry.name: entry for entry in entries}
        if "return_type" not in self._arguments and not _has_unembedding(found.names):
            self._arguments = {**self._arguments, "return_type": None}  # logits are not needed
        entries = (*(_entry(name, rows) for name, rows in beside.items()), *entries)
        self._shard_bytes = shard_bytes
        self.index = Index(
            beginning.model_fields(self._model),
            beginning.versions(),
            entries,
            max(1, shard_bytes // max(1, _bytes_of_example(entries, self._width))),
        )
        if known is not None:
            beginning.refuse_other(self._directory, known, self.index)
            beginning.check_first(self._directory, known, {**beside, **found.tensors})
            self.index = known
        self._check_room(sum(each.nbytes for each in (*beside.values(), *found.tensors.values())))
        if known is None:
            write_index(self._directory, self.index)

    def _check_room(self, bytes_of_first: int) -> None:
        in_first = len(self._first.batch.tokens)
        self.n_examples = self._source.n_examples(in_first)
        if self.n_examples is not None and not self.index.is_complete:
            needed = bytes_of_first * self.n_examples // in_first - self.index.n_bytes
            beginning.check_room(self._directory, needed)

    def run(self, progress: bool) -> None:
        """Harvest what is not there yet."""
        ring = Ring(self._shard_bytes, self._at_once + 3, self._devices)
        writer = Writer(self._directory, self.index, ring)
        is_complete = False
        try:
            with contextlib.ExitStack() as stack:
                bar = stack.enter_context(Bar(self.n_examples, self.index.n_examples, progress))
                for copied in stack.enter_context(contextlib.closing(self._copied(ring))):
                    bar.add(len(copied.tokens) - copied.skip, self._width, writer.index.n_bytes)
                    writer.put(copied)
            is_complete = not self.index.is_complete
        finally:
            writer.close(is_complete)

    def _copied(self, ring: Ring) -> Generator[Copied, None, None]:
        """What is kept of each batch, while the next one is run: one ahead on a device, no more."""
        arriving: deque[Buffer] = deque()
        for copied in self._each(self._items(ring)):
            arriving.append(copied.buffer)
            yield copied
            if len(arriving) > 1:
                arriving.popleft().wait()

    def _each(self, items: Iterator[_Item]) -> Iterator[Copied]:
        first = next(items, None)
        if first is not None and first.batch is self._first.batch:
            found, self._first.found = self._first.found, None
            assert found is not None
            yield self._copy(first, found)
            del found
        elif first is not None:
            yield from in_flight(self._model, self._run, [first], at_once=1)
        yield from in_flight(self._model, self._run, items, self._at_once)

    def _items(self, ring: Ring) -> Iterator[_Item]:
        """The batches that are not there yet, each with a buffer. Compares those that are.

        Raises:
            ValueError: if they are others, or of another width.
        """
        seen, there = 0, self.index.n_examples
        for number, batch in enumerate(self._all_batches()):
            n_examples, width = batch.tokens.shape
            if width != self._width:
                raise ValueError(
                    f"batch {number} has {width} tokens in a row, but those before it "
                    f"{self._width}: pad or cut it, or harvest it to another directory"
                )
            skip = min(max(there - seen, 0), n_examples)
            self._compare(batch, seen, skip)
            seen += n_examples
            if skip == n_examples:
                continue
            if self.index.is_complete:
                raise self._other_data(f"is complete with {there} examples, but batches has more")
            kept = self._keeping.tokens_of(batch.tokens, batch.mask)
            n_rows = n_examples if kept is None else int(kept.sum())
            yield _Item(batch, kept, skip, ring.take(self._room(n_rows)))
        if seen < there:
            raise self._other_data(f"has {there} examples, but batches has {seen}")

    def _all_batches(self) -> Iterator[Batch]:
        yield self._first.batch
        yield from self._batches

    def _compare(self, batch: Batch, start: int, count: int) -> None:
        """Compare examples that are written with what they would be now."""
        for name, rows in _beside(batch, None).items():
            if count and not torch.equal(self._stored(name)[start : start + count], rows[:count]):
                raise self._other_data(
                    f"has other {name} from example {start} on than batches has there"
                )

    def _stored(self, name: str) -> Stored:
        entry = next(entry for entry in self.index.entries if entry.name == name)
        return Stored(self._directory, self.index, entry)

    def _other_data(self, what: str) -> ValueError:
        return ValueError(
            f"the harvest in {self._directory} {what}: go on with the data that it was begun with,"
            " or harvest to another directory"
        )

    def _room(self, n_rows: int) -> list[int]:
        """The sizes of a buffer's parts, for a batch of so many rows."""
        sizes = {
            name: entry.row_bytes * (1 if entry.axis == "shared" else n_rows)
            for name, entry in self._entries.items()
        }
        return [room_for(sizes[name] for name in names) for names in self._groups]

    def _run(self, view: Any, item: _Item) -> Copied:
        found = self._of_forward(view, (item.batch, item.kept))
        if found.names != self._names:
            raise ValueError("this batch has not the same activations as the first one")
        return self._copy(item, found)

    def _of_forward(self, view: Any, what: tuple[Batch, torch.Tensor | None]) -> Found:
        batch, kept = what
        arguments = {**self._arguments, **batch.arguments}
        _, cache = view.run_with_cache(
            batch.given,
            names_filter=self._keeping.names_filter,
            return_cache_object=False,
            **arguments,
        )
        return self._keeping.of(cache, kept, self._points)

    def _copy(self, item: _Item, found: Found) -> Copied:
        batch, kept = item.batch, item.kept
        tokens = batch.tokens.shape if kept is None else None
        counts = [tokens[1]] * tokens[0] if tokens else kept.sum(1).tolist()  # type: ignore[union-attr]
        n_rows = len(batch.tokens) if kept is None else sum(counts)
        self._check_shapes(found.tensors, n_rows)
        rows = {**_beside(batch, kept), **item.buffer.copy(found.tensors, self._groups)}
        return Copied(rows, counts, item.skip, item.buffer)

    def _check_shapes(self, found: Mapping[str, torch.Tensor], n_rows: int) -> None:
        expected = {name: each for name, each in self._entries.items() if each.same_as is None}
        for name, entry in expected.items():
            shape = entry.shape if entry.axis == "shared" else (n_rows, *entry.shape)
            if tuple(found[name].shape) != shape or found[name].dtype != entry.torch_dtype:
                raise ValueError(
                    f"{name} is {found[name].dtype} {list(found[name].shape)}, but by the first "
                    f"batch it would be {entry.torch_dtype} {list(shape)}"
                )


def _beside(batch: Batch, kept: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """What is stored with the activations."""
    beside = {TOKENS: batch.tokens, MASK: batch.mask}
    return beside if kept is None else {**beside, KEPT: kept}


def _entry(name: str, rows: torch.Tensor) -> Entry:
    return Entry(name, str(rows.dtype).removeprefix("torch."), tuple(rows.shape[1:]))


def _bytes_of_example(entries: Iterable[Entry], width: int) -> int:
    """At most; fewer tokens may be kept."""
    each = {"example": 1, "token": width, "shared": 0}
    return sum(entry.row_bytes * each[entry.axis] for entry in entries if entry.same_as is None)


def _has_unembedding(names: Iterable[str]) -> bool:
    return any(name.startswith("unembed") for name in names)

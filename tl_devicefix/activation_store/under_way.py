"""A harvest that is under way, from its first batch, which says what is written, to its last."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path

from tl_devicefix.activation_store import beginning
from tl_devicefix.activation_store.batches import Batch, Batches
from tl_devicefix.activation_store.copying import Buffer, Ring
from tl_devicefix.activation_store.format import Entry, Index, write_index
from tl_devicefix.activation_store.forwards import Forwards, Item, stored_beside
from tl_devicefix.activation_store.keeping import Found
from tl_devicefix.activation_store.on_hosts import HostMemory
from tl_devicefix.activation_store.progress import Bar
from tl_devicefix.activation_store.there import There
from tl_devicefix.activation_store.writing import Copied, Writer


class UnderWay:
    """One call of `save_activations`. Nothing is written if the first batch cannot be run.

    Args:
        forwards: of the model.
        source: the batches.
        directory: where to, in which nobody else writes.
        known: what is there, to go on with.
        shard_bytes: of a shard, at most.

    Raises:
        ValueError: if there is nothing to write, it cannot be stored, or another thing is there.
        OSError: if the disk has not the room.
    """

    def __init__(
        self,
        forwards: Forwards,
        source: Batches,
        directory: Path,
        known: Index | None,
        shard_bytes: int,
    ) -> None:
        self._forwards, self._directory = forwards, directory
        self._batches = iter(source)
        first = next(self._batches, None)
        if first is None:
            raise ValueError("there is nothing to harvest: batches has none")
        self._first, self._width = first, first.tokens.shape[1]
        kept = self._kept = forwards.keeping.tokens_of(first.tokens, first.mask)
        found, entries = forwards.first(first, kept)
        self._found: Found | None = found
        index = Index(
            beginning.model_fields(forwards.model),
            beginning.versions(),
            entries,
            max(1, shard_bytes // max(1, _bytes_of_example(entries, self._width))),
        )
        self._index = known or index
        self._there = There(directory, self._index)
        beside = stored_beside(first, kept)
        if known is not None:
            self._there.refuse_other(index)
            self._there.compare(beside, 0, min(len(first.tokens), known.n_examples))
            self._there.check_first(found.tensors)
        self._n_examples = source.n_examples(len(first.tokens))
        self._n_bytes = self._bytes_of_all(
            sum(each.nbytes for each in (*beside.values(), *found.tensors.values()))
        )
        if self._n_bytes is not None:
            beginning.check_room(directory, self._n_bytes - self._index.n_bytes)
        if known is None:
            write_index(directory, index)

    def _bytes_of_all(self, of_first: int) -> int | None:
        """How many bytes will be there, if all batches are as the first; None if nobody knows."""
        if self._n_examples is None:
            return None
        if self._index.is_complete:
            return self._index.n_bytes
        return of_first * self._n_examples // len(self._first.tokens)

    def run(self, progress: bool) -> None:
        """Save what is not there yet."""
        forwards = self._forwards
        memory = HostMemory(forwards.devices)
        n_batches = forwards.max_in_flight + 3
        ring = Ring(self._index.examples_per_shard, n_batches, memory, forwards.groups)
        writer = Writer(self._directory, self._index, ring)
        n_kept = sum(shard.tokens for shard in self._index.shards)
        is_complete = False
        try:
            with contextlib.ExitStack() as stack:
                bar = stack.enter_context(
                    Bar(self._n_examples, self._index.n_examples, self._n_bytes, progress)
                )
                for copied in stack.enter_context(contextlib.closing(self._copied(ring))):
                    n_bytes = sum(rows.nbytes for rows in copied.rows.values())
                    bar.add(len(copied.tokens) - copied.skip, self._width, n_bytes)
                    n_kept += sum(copied.tokens[copied.skip :])
                    writer.put(copied)
            if not n_kept:
                raise ValueError("token_mask has left out every token: nothing is kept")
            is_complete = not self._index.is_complete
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

    def _each(self, items: Iterator[Item]) -> Iterator[Copied]:
        first = next(items, None)
        found, self._found = self._found, None
        if first is not None and first.batch is self._first:
            assert found is not None
            yield self._forwards.copy(first, found)
        elif first is not None:
            yield from self._forwards.each([first], max_in_flight=1)
        del found, first
        yield from self._forwards.each(items)

    def _items(self, ring: Ring) -> Iterator[Item]:
        """The batches that are not there yet, each with a buffer. Compares those that are.

        Raises:
            ValueError: if they are others, or of another width.
        """
        forwards, seen, there = self._forwards, 0, self._index.n_examples
        for number, batch in enumerate(self._all_batches()):
            n_examples, width = batch.tokens.shape
            if width != self._width:
                raise ValueError(
                    f"batch {number} has {width} tokens in a row, but those before it "
                    f"{self._width}: pad or cut it (texts by model.to_tokens of all of them), or "
                    "harvest it to another directory"
                )
            kept = self._kept
            if number:
                kept = forwards.keeping.tokens_of(batch.tokens, batch.mask)
            skip = min(max(there - seen, 0), n_examples)
            self._there.compare(stored_beside(batch, kept), seen, skip)
            seen += n_examples
            if skip == n_examples:
                continue
            if self._index.is_complete:
                raise self._there.other_data(
                    f"is complete with {there} examples, but batches has more"
                )
            room = forwards.room(n_examples, width)
            yield Item(batch, kept, skip, ring.take(n_examples, room))
        if seen < there:
            raise self._there.other_data(f"has {there} examples, but batches has {seen}")

    def _all_batches(self) -> Iterator[Batch]:
        yield self._first
        yield from self._batches


def _bytes_of_example(entries: Iterable[Entry], width: int) -> int:
    """At most; fewer tokens may be kept."""
    each = {"example": 1, "token": width, "shared": 0}
    return sum(entry.row_bytes * each[entry.axis] for entry in entries if entry.same_as is None)

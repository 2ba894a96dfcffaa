"""The thread that writes shards of what was copied, while devices compute what comes next."""

from __future__ import annotations

import errno
import queue
import threading
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch

from tl_devicefix.activation_store.copying import Buffer, Ring
from tl_devicefix.activation_store.format import (
    Index,
    Shard,
    same_bytes,
    shard_name,
    write_index,
    write_shard,
)


@dataclass(frozen=True)
class Copied:
    """What is kept of a batch, in host memory.

    Attributes:
        rows: by name; what is in `buffer` is there after `buffer.wait()`.
        tokens: how many of each example are kept.
        skip: how many of its examples are written already.
        buffer: whose memory it is.
    """

    rows: dict[str, torch.Tensor]
    tokens: list[int]
    skip: int
    buffer: Buffer


class _End(NamedTuple):
    is_complete: bool


class Writer:
    """Writes what it is given in another thread, in order, and adds each shard to the index.

    Which example is in which shard depends on the index only, not on when it is written.

    Args:
        directory: where to.
        index: as it is there; goes on after its shards.
        ring: of the buffers, which is told of an error.
    """

    def __init__(self, directory: Path, index: Index, ring: Ring) -> None:
        self._directory, self._ring = directory, ring
        self.index = index
        self._axes = {e.name: e.axis for e in index.entries if e.same_as is None}
        self._filling = _Filling(index.n_examples)
        self._shared: dict[str, torch.Tensor] = {}
        self._given: queue.SimpleQueue[Copied | _End] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._interrupt: BaseException | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="harvest writer", daemon=True)
        self._thread.start()

    def put(self, copied: Copied) -> None:
        """Have a batch written. That it is bounded how many wait is the ring's."""
        self._given.put(copied)

    def close(self, is_complete: bool) -> None:
        """Wait until all is written.

        Args:
            is_complete: whether that was all there is. If not, what fills no shard is left out: it
                is harvested again by who resumes.

        Raises:
            OSError: if something could not be written; what was written before is there.
            KeyboardInterrupt: when it comes, after the shard that is being written.
        """
        try:
            self._given.put(_End(is_complete))
            self._ended.wait()
        except BaseException as interrupt:
            self._interrupt = interrupt
            self._ended.wait()  # until then, nobody else may write there
            raise
        self._thread.join()  # not before: it takes a thread for ended once it was interrupted
        if is_complete and self._error is not None:
            raise self._error

    def _work(self) -> None:
        try:
            while not isinstance(given := self._given.get(), _End):
                given.buffer.wait()
                self._add(given)
                given.buffer.let_go()
                del given
            if given.is_complete:
                if self._filling.n_examples:
                    self._write_shard()
                self.index = replace(self.index, is_complete=True)
                write_index(self._directory, self.index)
        except BaseException as error:  # noqa: BLE001  # raised where a buffer is taken, and by close
            self._error = self._in_a_sentence(error)
            self._ring.fail(self._error)
        finally:
            self._ended.set()

    def _in_a_sentence(self, error: BaseException) -> BaseException:
        if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return error
        return OSError(
            error.errno,
            f"the disk of {self._directory} is full: {self.index.n_examples} examples are written; "
            f"make room, and harvest the rest with resume=True ({error.strerror})",
        )

    def _add(self, copied: Copied) -> None:
        """Add a batch's examples to the shards where they belong."""
        self._check_shared(copied)
        ends = [0, *accumulate(copied.tokens)]
        start, count = copied.skip, len(copied.tokens)
        while start < count:
            stop = min(count, start + self.index.examples_per_shard - self._filling.n_examples)
            for name, axis in self._axes.items():
                if axis != "shared":
                    rows = (ends[start], ends[stop]) if axis == "token" else (start, stop)
                    self._filling.pieces[name].append(copied.rows[name][slice(*rows)])
            copied.buffer.keep()
            self._filling.buffers.append(copied.buffer)
            self._filling.n_examples += stop - start
            self._filling.n_tokens += ends[stop] - ends[start]
            start = stop
            if self._filling.n_examples == self.index.examples_per_shard:
                self._write_shard()

    def _check_shared(self, copied: Copied) -> None:
        for name, axis in self._axes.items():
            if axis == "shared":
                known = self._shared.get(name)
                if known is None:
                    known = self._shared[name] = copied.rows[name].clone()
                if not same_bytes(known, copied.rows[name]):
                    raise ValueError(
                        f"{name} is {list(known.shape)}, which is no row for each example, and is "
                        "not the same in each batch: leave it out of names_filter, or have "
                        "transform return [batch, ...]"
                    )

    def _write_shard(self) -> None:
        if self._interrupt is not None:
            raise self._interrupt
        filled = self._filling
        name = shard_name(len(self.index.shards))
        start, stop = filled.start, filled.start + filled.n_examples
        pieces = {
            name: [self._shared[name]] if axis == "shared" else filled.pieces[name]
            for name, axis in self._axes.items()
        }
        size, checksum = write_shard(self._directory / name, pieces, start, stop)
        self.index = self.index.with_shard(
            Shard(name, start, stop, filled.n_tokens, size, checksum)
        )
        write_index(self._directory, self.index)
        for buffer in filled.buffers:
            buffer.let_go()
        self._filling = _Filling(stop)


class _Filling:
    """A shard that is not full yet, from an example on."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.n_examples = 0
        self.n_tokens = 0
        self.pieces: dict[str, list[torch.Tensor]] = defaultdict(list)
        self.buffers: list[Buffer] = []

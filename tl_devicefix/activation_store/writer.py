"""Copy activations to the host while devices compute, and write them in a thread."""

from __future__ import annotations

import functools
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch

from tl_devicefix.activation_store.format import Index, Shard, shard_name, write_index, write_shard
from tl_devicefix.placement.devices import module_with_streams


class Copied(NamedTuple):
    """The saved activations of a batch, in host memory, complete after `wait()`."""

    rows: dict[str, torch.Tensor]  # [batch, ...], or [saved_tokens, ...] with a token mask
    tokens: list[int]  # the number of saved tokens of each example
    skip: int = 0  # the number of examples that are on disk already
    arrivals: tuple[torch.Event, ...] = ()

    def wait(self) -> None:
        """Wait until the copies are done."""
        for arrived in self.arrivals:
            arrived.synchronize()


@torch.no_grad()
def start_copies(
    tensors: Mapping[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], tuple[torch.Event, ...]]:
    """Start copying tensors to the host, on streams other than those that compute.

    If a device has streams, its copies are in pinned memory: wait for the events before use.
    """
    copies, streams = {}, set()
    for name, tensor in tensors.items():
        module = module_with_streams(tensor.device)
        copy = functools.partial(torch.empty, tensor.shape, dtype=tensor.dtype, device="cpu")
        if module is None:
            copies[name] = copy().copy_(tensor)
            continue
        stream = _download_stream(tensor.device)
        # The copy waits for the kernels that write the tensor.
        stream.wait_stream(module.current_stream(tensor.device))
        # Record the stream, so that the allocator does not reuse the memory before the copy.
        tensor.record_stream(stream)
        with module.stream(stream):
            copies[name] = copy(pin_memory=True).copy_(tensor, non_blocking=True)
        streams.add(stream)
    return copies, tuple(stream.record_event() for stream in streams)


@functools.cache
def _download_stream(device: torch.device) -> torch.Stream:
    # `offload.py` has another stream, so that weights do not wait behind activations.
    return module_with_streams(device).Stream(device)


class Writer:
    """A thread that writes batches in order to shards, and adds each shard to the index.

    It keeps at most two shards in host memory, one being written and one filling, plus `n_batches`
    in flight.
    """

    def __init__(self, directory: Path, index: Index, n_batches: int) -> None:
        self.index = index
        self._directory, self._n_batches = directory, n_batches
        self._begin_shard()
        self._largest, self._n_taken = 0, index.n_examples
        self._has_ended = False
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="activations writer")
        # Batches that may not be on disk yet. A single thread writes them in order.
        self._writes: deque[Future[None]] = deque()

    def make_room(self, n_examples: int) -> None:
        """Wait until host memory has room for more examples; raises the errors of the thread."""
        self._largest = max(self._largest, n_examples)
        self._n_taken += n_examples
        # With room for one shard, devices would wait while it is written.
        limit = 2 * self.index.examples_per_shard + self._n_batches * self._largest
        while self._writes and (
            self._writes[0].done() or self._n_taken - self.index.n_examples > limit
        ):
            self._writes.popleft().result()

    def put(self, copied: Copied) -> None:
        """Queue a batch to be written, after `make_room`."""
        self._writes.append(self._pool.submit(self._unless_ended, self._add, copied))

    def close(self, is_complete: bool) -> None:
        """Wait until everything is written; after an interrupt, only for the current shard.

        Unless the data is complete, examples that fill no shard are dropped, and computed again
        when you resume.
        """
        try:
            if is_complete:
                self._writes.append(self._pool.submit(self._unless_ended, self._complete))
            wait(self._writes)
        except BaseException:
            self._has_ended = True  # batches in the queue are not written
            raise
        finally:
            self._pool.shutdown()  # until then nobody else may write to the directory
        for written in self._writes if is_complete else ():
            written.result()

    def _unless_ended(self, write: Callable[..., None], *args: Copied) -> None:
        """Write, unless an earlier write failed or `close` was interrupted."""
        if self._has_ended:  # later shards would lack examples
            return
        try:
            write(*args)
        except BaseException:
            self._has_ended = True
            raise

    def _begin_shard(self) -> None:
        self._pieces: dict[str, list[torch.Tensor]] = defaultdict(list)
        self._n_examples = self._n_tokens = 0

    def _add(self, copied: Copied) -> None:
        """Add a batch's examples to their shards."""
        # batches  [0 1 2 3][4 5 6 7][8 9 ...     are cut where a shard is full:
        # shards   [0 1 2 3 4 5][6 7 8 9 10 11]   each has `examples_per_shard`
        copied.wait()
        ends = [0, *accumulate(copied.tokens)]
        start, count = copied.skip, len(copied.tokens)
        while start < count:
            stop = min(count, start + self.index.examples_per_shard - self._n_examples)
            for entry in self.index.entries:
                by_token = entry.axis == "token"  # rows: [saved_tokens, ...], else [examples, ...]
                rows = slice(ends[start], ends[stop]) if by_token else slice(start, stop)
                self._pieces[entry.name].append(copied.rows[entry.name][rows])
            self._n_examples += stop - start
            self._n_tokens += ends[stop] - ends[start]
            start = stop
            if self._n_examples == self.index.examples_per_shard:
                self._write_shard()

    def _write_shard(self, is_last: bool = False) -> None:
        if self._has_ended:  # `close` was interrupted: write no more shards of this batch
            raise InterruptedError
        file, start = shard_name(len(self.index.shards)), self.index.n_examples
        stop = start + self._n_examples
        size, checksum = write_shard(self._directory / file, self._pieces, start, stop)
        shard = Shard(file, start, stop, self._n_tokens, size, checksum)
        self.index = replace(self.index, shards=(*self.index.shards, shard), is_complete=is_last)
        write_index(self._directory, self.index)
        self._begin_shard()

    def _complete(self) -> None:
        if self._n_examples:
            self._write_shard(is_last=True)
        else:
            self.index = replace(self.index, is_complete=True)
            write_index(self._directory, self.index)

"""`save_activations`: the activations of many batches, written while the next ones are computed."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from inspect import signature
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers.utils.logging as hf_logging

from tl_devicefix.activation_store import resume as on_disk
from tl_devicefix.activation_store.batches import Batch, Batches
from tl_devicefix.activation_store.format import (
    MASK,
    TOKEN_MASK,
    TOKENS,
    Entry,
    Index,
    dtype_name,
    write_index,
)
from tl_devicefix.activation_store.reader import SavedActivations, load_activations
from tl_devicefix.activation_store.selection import (
    Selected,
    Selection,
    TokenMask,
    Transform,
    checked_names,
    entries_of,
)
from tl_devicefix.activation_store.writer import Copied, Writer, start_copies
from tl_devicefix.checkpoints.configs import torch_dtype
from tl_devicefix.dispatch.carrying import outputs_unread
from tl_devicefix.misspelt import refuse_misspelt
from tl_devicefix.pipelining.pipeline_map import devices_of, pipeline_map, viewing
from tl_devicefix.placement.memory import bytes_of, gib


def save_activations(
    model: Any,
    batches: Iterable[Any],
    names_filter: Any = None,
    *,
    directory: str | os.PathLike[str],
    dtype: torch.dtype | str | None = None,
    transform: Transform | Mapping[str, Transform] | None = None,
    token_mask: TokenMask | None = None,
    resume: bool = False,
    shard_size: int | str = "512MiB",
    max_in_flight: int | None = None,
    progress: bool = True,
    **arguments: Any,
) -> SavedActivations:
    """Run a model on batches, and write activations to a directory while the next batch is run.

    Activations are copied to host memory on a stream of their own, and written by a thread. When
    the disk is slower than the devices, the devices wait: host memory holds two shards and some
    batches, however many there are. Over several devices, several batches run at once
    (`pipeline_map`). An activation that all examples share, such as rotary tables, is stored for
    each of them.

    However a call ends, the shards that its index lists are complete. The same call with
    ``resume=True`` goes on, and ends with the same bytes. It runs the first batch again, and then
    those that are not written, and reads `batches` from the beginning to compare the tokens.

    Args:
        model: a HookedTransformer or TransformerBridge, on any number of devices.
        batches: each is tokens `[batch, pos]`, a list of texts, or a dict with "tokens" or
            "input_ids" and, if there is padding, "attention_mask", as a DataLoader, or
            `iter(batch_size=8)` of a `datasets.Dataset`, yields them. All have as many tokens.
        names_filter: which activations: a name, names, or a function of a name. By default all.
        directory: is made if it does not exist. After `init_hosts`, rank 0 writes all.
        dtype: to which activations are converted on their device. By default as they are computed,
            bit for bit.
        transform: a function of an activation, called on its device: its result, `[batch, ...]`,
            is stored instead. Or a dict from names to such functions.
        token_mask: which tokens' activations are stored: a function of tokens `[batch, pos]` (on
            the CPU) that returns booleans of that shape, or "attention_mask" for all but padding.
        resume: go on with activations that are in the directory, if there are any.
        shard_size: bytes of a file, or "512MiB": a shard has as many examples as fit, at least one.
        max_in_flight: how many batches are run at once; see `pipeline_map`.
        progress: show a bar with examples, tokens and bytes a second.
        arguments: of the forward, as `stop_at_layer`.

    Returns:
        The activations, as `load_activations` opens them.

    Raises:
        TypeError: for a model of neither class, an item that is no batch, a `transform` that
            returns no tensor, or arguments that would change what a run leaves behind.
        ValueError: for batches of different widths; a selection of nothing; activations that cannot
            be stored; names that the model does not have or compute; and, with `resume`, another
            model, filter, dtype or data than on disk: named.
        FileExistsError: if activations are in the directory, without `resume`.
        FileNotFoundError: if others than the last of their shards are gone, or all are.
        RuntimeError: if another process saves to the directory.
        OSError: if the disk is too small, before anything is written; or is full.
        HostLost: if another host is lost. Shards that the index lists are complete.
    """
    for name in _INSTEAD.keys() & arguments.keys():
        raise TypeError(f"save_activations() has no argument {name!r}: {_INSTEAD[name]}")
    viewing(model)  # refuses what is no model
    functions = (save_activations, model.forward)
    refuse_misspelt(
        "save_activations()", arguments, [n for f in functions for n in signature(f).parameters]
    )
    directory = Path(directory)
    source = Batches(batches, model)
    dtype = None if dtype is None else torch_dtype(dtype)
    selection = Selection(checked_names(names_filter, model), dtype, transform, token_mask)
    shard_bytes = bytes_of(shard_size, "shard_size")
    if shard_bytes < 1:
        raise ValueError(f"shard_size must be 1 byte or more, but is {shard_size!r}")
    saved = on_disk.saved_index(directory, resume)
    with torch.no_grad():
        saving = _Saving(model, source, selection, arguments, max_in_flight, directory)
        saving.run_first(saved)
        with on_disk.locked(directory):
            saving.begin(on_disk.saved_index(directory, resume), shard_bytes)
            saving.run(progress)
    return load_activations(directory)


_INSTEAD = {
    "attention_mask": "give batches that are dicts with one",
    "batch_size": "give batches, such as tokens.split(8)",
    "incl_bwd": "gradients are not saved",
    "padding_side": "set model.tokenizer.padding_side before",
    "pos_slice": "give a transform, such as lambda activation: activation[:, -1]",
    "prepend_bos": "give tokens, such as model.to_tokens(texts, prepend_bos=False)",
    "remove_batch_dim": "read saved[name][3], or saved.cache(3)",
}
"""Arguments of `run_with_cache` that would change what a run leaves behind, and what to do."""


class _Item(NamedTuple):
    """A batch that is run.

    Attributes:
        batch: the input.
        saved: which tokens are saved, `[batch, pos]`; None for all.
        skip: how many of its examples are on disk already.
    """

    batch: Batch
    saved: torch.Tensor | None
    skip: int = 0


class _Saving:
    """One call of `save_activations`."""

    def __init__(
        self,
        model: Any,
        source: Batches,
        selection: Selection,
        arguments: dict[str, Any],
        max_in_flight: int | None,
        directory: Path,
    ) -> None:
        n_devices = len(devices_of(model))
        self._max_in_flight = (
            n_devices + (n_devices > 1) if max_in_flight is None else max_in_flight
        )
        self._model, self._selection, self._directory = model, selection, directory
        self._source, self._batches = source, iter(source)
        self._arguments, self._points = arguments, dict(model.hook_dict)

    def run_first(self, saved: Index | None) -> None:
        """Run the first batch, which says what is written; nothing is, if it cannot be.

        Args:
            saved: of activations to go on with, if there are any.

        Raises:
            ValueError: if there is no batch, or it cannot be stored.
            OSError: if the disk is too small.
        """
        batch = next(self._batches, None)
        if batch is None:
            raise ValueError("batches has no batch: give at least one")
        n_examples, self._width = batch.tokens.shape
        self._first = self._item(batch)
        (selected,) = pipeline_map(self._model, self._forward, [self._first], max_in_flight=1)
        self._selected: Selected | None = selected
        self._names, beside = selected.names, _beside(self._first)
        n_rows = n_examples if self._first.saved is None else int(self._first.saved.sum())
        stop = self._arguments.get("stop_at_layer")
        entries = entries_of(self._selection, selected, n_rows, stop)
        self._entries = (
            *(Entry(n, dtype_name(t.dtype), tuple(t.shape[1:])) for n, t in beside.items()),
            *entries,
        )
        if not any(name.startswith("unembed") for name in self._names):  # logits are not needed
            self._arguments = {"return_type": None, **self._arguments}
        self._total, self._n_bytes = self._source.most_examples(n_examples), None
        if saved is not None and saved.is_complete:
            self._total, self._n_bytes = saved.n_examples, saved.n_bytes
        elif self._total is not None:
            of_first = sum(t.nbytes for t in (*beside.values(), *selected.tensors.values()))
            self._n_bytes = of_first * self._total // n_examples
            written = 0 if saved is None else saved.n_bytes
            on_disk.check_disk(self._directory, self._n_bytes - written)

    def begin(self, saved: Index | None, shard_bytes: int) -> None:
        """Write an index of no shards, or compare with what is on disk.

        Args:
            saved: of activations to go on with, if there are any.
            shard_bytes: of a shard, at most.

        Raises:
            ValueError: if others are on disk.
        """
        on_disk.remove_temporary(self._directory)
        rows = {"example": 1, "token": self._width}  # at most: fewer tokens may be saved
        of_example = sum(e.row_bytes * rows[e.axis] for e in self._entries if e.same_as is None)
        per_shard = max(1, shard_bytes // of_example)
        index = Index(
            on_disk.model_fields(self._model), on_disk.versions(), self._entries, per_shard
        )
        self._index = index if saved is None else saved
        self._saved = on_disk.Saved(self._directory, self._index)
        if saved is None:
            write_index(self._directory, index)
            return
        assert self._selected is not None
        n_examples = len(self._first.batch.tokens)
        self._saved.compare_index(index)
        self._saved.compare_tokens(_beside(self._first), 0, min(n_examples, saved.n_examples))
        self._saved.compare_activations(self._selected.tensors)
        if saved.n_examples >= n_examples:
            self._selected = None  # it is not saved again

    def run(self, progress: bool) -> None:
        """Save the batches that are not on disk yet."""
        writer = Writer(self._directory, self._index, self._max_in_flight + 3)
        n_saved = sum(shard.tokens for shard in self._index.shards)
        began, n_tokens, n_bytes, is_complete = time.perf_counter(), 0, 0, False
        try:
            with self._bar(progress) as bar, contextlib.closing(self._copied(writer)) as results:
                for copied in results:
                    n_examples = len(copied.tokens) - copied.skip
                    n_saved += sum(copied.tokens[copied.skip :])
                    n_tokens += n_examples * self._width
                    n_bytes += sum(rows.nbytes for rows in copied.rows.values())
                    seconds = time.perf_counter() - began
                    speed = f"{n_tokens / seconds:.0f} tokens/s, {gib(n_bytes / seconds)}/s"
                    bar.set_postfix_str(speed, refresh=False)
                    bar.update(n_examples)
                    writer.put(copied)
                bar.total = bar.n  # the last batch may have had fewer examples
                bar.refresh()
            if not n_saved:
                raise ValueError(
                    "token_mask leaves out every token: let it return True for those to save"
                )
            is_complete = not self._index.is_complete
        finally:
            writer.close(is_complete)

    def _bar(self, is_shown: bool) -> Any:
        return hf_logging.tqdm(
            total=self._total,
            initial=self._index.n_examples,
            desc="Activations" + (f" of {gib(self._n_bytes)}" if self._n_bytes else ""),
            unit=" examples",
            disable=not is_shown,
        )

    def _copied(self, writer: Writer) -> Generator[Copied, None, None]:
        """The batches in host memory. Copies of two at most are under way, so devices wait too."""
        arriving: deque[Copied] = deque()
        for copied in pipeline_map(
            self._model, self._run, self._items(writer), self._max_in_flight
        ):
            arriving.append(copied)
            yield copied
            if len(arriving) > 1:
                arriving.popleft().wait()

    def _item(self, batch: Batch) -> _Item:
        return _Item(batch, self._selection.saved_tokens(batch.tokens, batch.mask))

    def _items(self, writer: Writer) -> Iterator[_Item]:
        """The batches that are not on disk yet. Compares those that are.

        Raises:
            ValueError: if they are others, or of another width.
        """
        seen, on_disk_already = 0, self._index.n_examples
        items = chain([self._first], map(self._item, self._batches))
        for number, item in enumerate(items):
            n_examples, width = item.batch.tokens.shape
            if width != self._width:
                raise ValueError(
                    f"batch {number} has {width} tokens in a row, but those before it have "
                    f"{self._width}: pad all to one width (texts by model.to_tokens of all of "
                    "them), or save it to another directory"
                )
            skip = min(max(on_disk_already - seen, 0), n_examples)
            self._saved.compare_tokens(_beside(item), seen, skip)
            seen += n_examples
            if skip == n_examples:
                continue
            if self._index.is_complete:
                raise self._saved.other_data(
                    f"they are complete with {on_disk_already} examples, but batches has more"
                )
            writer.make_room(n_examples - skip)
            yield item._replace(skip=skip)
        if seen < on_disk_already:
            raise self._saved.other_data(
                f"they have {on_disk_already} examples, but batches has {seen}"
            )

    def _run(self, view: Any, item: _Item) -> Copied:
        """Run a batch, and start to copy what is saved of it."""
        selected: Selected | None = None
        if item.batch is self._first.batch:  # which `run_first` has run
            selected, self._selected = self._selected, None
        if selected is None:
            selected = self._forward(view, item)
        if selected.names != self._names:
            name = min({*selected.names.items()} ^ {*self._names.items()})[0]
            raise ValueError(
                f"this batch gives other activations than the first one, such as {name}: remove "
                "it from names_filter, or save such batches to another directory"
            )
        n_examples, width = item.batch.tokens.shape
        counts = [width] * n_examples if item.saved is None else item.saved.sum(1).tolist()
        rows = {"example": n_examples, "token": sum(counts)}
        for e in self._entries:
            tensor = selected.tensors.get(e.name)
            expected = torch.Size((rows[e.axis], *e.shape))
            if tensor is not None and (tensor.shape, tensor.dtype) != (expected, e.torch_dtype):
                raise ValueError(
                    f"{e.name} is {tensor.dtype} {list(tensor.shape)} in this batch, but would be "
                    f"{e.torch_dtype} {list(expected)} as in the first one: save such batches to "
                    "another directory"
                )
        copies, arrivals = start_copies(selected.tensors)
        return Copied({**_beside(item), **copies}, counts, item.skip, arrivals)

    def _forward(self, view: Any, item: _Item) -> Selected:
        with outputs_unread():
            _, cache = view.run_with_cache(
                item.batch.inputs,
                names_filter=self._selection.names_filter,
                return_cache_object=False,
                **{**self._arguments, **item.batch.arguments},
            )
        tokens = item.batch.tokens
        return self._selection.of(cache, tokens, item.saved, self._points)


def _beside(item: _Item) -> dict[str, torch.Tensor]:
    """Tokens and masks, which are stored beside a batch's activations."""
    beside = {TOKENS: item.batch.tokens, MASK: item.batch.mask}
    return beside if item.saved is None else {**beside, TOKEN_MASK: item.saved}

"""`save_activations`: write the activations of batches while the next batches run."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers.utils.logging as hf_logging

from tl_devicefix.activation_store.format import (
    INDEX,
    LOCK,
    Index,
    StoredTensor,
    dtype_name,
    read_index,
    shard_name,
    write_index,
)
from tl_devicefix.activation_store.reader import SavedActivations, load_activations
from tl_devicefix.activation_store.selection import (
    Selection,
    TokenBatch,
    TokenMask,
    Transform,
    checked_names,
    read_batches,
)
from tl_devicefix.activation_store.writer import Copied, Writer, start_copies
from tl_devicefix.adapters import adapter_of
from tl_devicefix.checkpoints.hub import torch_dtype
from tl_devicefix.errors import note
from tl_devicefix.gathering import home_of
from tl_devicefix.monkeypatch.versions import versions
from tl_devicefix.pipelining.pipeline_map import n_in_flight, pipeline_map, refuse_arguments
from tl_devicefix.placement.memory import parse_bytes
from tl_devicefix.types import Model

_log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from transformer_lens.hook_points import NamesFilter


def save_activations(
    model: Model,
    batches: Iterable[object],
    names_filter: NamesFilter = None,
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
    """Run a model on batches, and write its activations to a directory at the same time.

    A separate stream copies activations to CPU memory, and a thread writes them. If the disk is
    slower than the devices, the devices wait. CPU memory holds two shards and a few batches,
    however long the run. On several devices, several batches run at the same time (`pipeline_map`).
    An activation that all examples share, such as rotary tables, is stored for each of them.

    However a call ends, the shards that its index lists are complete. The same call with
    ``resume=True`` continues, and writes the same bytes as one uninterrupted call. It reads
    `batches` from the beginning to compare the tokens, runs the first batch again to compare
    shapes, and then runs the batches that are not written. It does not compare values of
    activations, so give the same model, hooks and `transform`.

    Args:
        model: a HookedTransformer or TransformerBridge, on any number of devices.
        batches: each is tokens `[batch, pos]`, or a dict with "tokens" or "input_ids" and, if there
            is padding, "attention_mask"; other inputs of the model, such as "position_ids", are
            refused. A DataLoader yields them, or `iter(batch_size=8)` of a `datasets.Dataset`. All
            need the same `pos`.
        names_filter: which activations: a name, names, or a function of a name. By default all.
        directory: where to write; created if missing. With several hosts, this process writes.
        dtype: the dtype to store, converted on the activation's device. By default the
            activation's own.
        transform: a function of an activation, or a dict from names to such functions. Its result,
            `[batch, ...]`, is stored instead; with `token_mask`, it must be `[batch, pos, ...]`. It
            is called on the activation's device.
        token_mask: which tokens' activations are stored: a function of tokens `[batch, pos]` (on
            the CPU) that returns booleans of that shape; or "attention_mask" for all but padding,
            if the batches are dicts with a mask.
        resume: continue after the activations in the directory, if there are any.
        shard_size: the size of a file, in bytes or as "512MiB". A shard has as many examples as
            fit, at least one. All their tokens count, even those that `token_mask` leaves out.
        max_in_flight: how many batches may be in flight; see `pipeline_map`.
        progress: show a progress bar.
        arguments: other arguments of the forward, such as `stop_at_layer`.

    Returns:
        The activations, as `load_activations` opens them.

    Raises:
        TypeError: for a model of neither class, an item that is not a batch, a `transform`
            that returns no tensor, or arguments that would change what is stored.
        ValueError: for batches of different widths; an empty selection; activations that cannot be
            stored; names that the model does not have or compute; and, with `resume`, if the
            model, names, dtype, data or versions differ from those on disk.
        FileExistsError: if the directory is a file, has activations and `resume` is False, or has
            shards and no index.
        FileNotFoundError: with `resume`, if the first shard is missing, or one before others.
        RuntimeError: if another process saves to the directory.
        OSError: if the disk is full.
        HostLost: if another host is lost. The shards that the index lists are complete.
    """
    adapter_of(model)  # raises for anything but a model
    n_runs = n_in_flight(model, max_in_flight)
    for name in arguments:
        if name in _CHANGE_WHAT_IS_STORED:
            raise TypeError(
                f"save_activations() has no argument {name!r}: batches have the tokens and masks, "
                "and a transform may take a part of an activation"
            )
    refuse_arguments(save_activations, model.run_with_cache, model, arguments)
    for name in {"past_kv_cache", "past_key_values"} & arguments.keys():
        if arguments[name] is not None and not getattr(arguments[name], "frozen", False):
            raise ValueError(
                f"{name} would grow from batch to batch: freeze it, or prepend its tokens to each "
                "batch"
            )
    if isinstance(token_mask, str) and token_mask != "attention_mask":
        raise ValueError(f"token_mask must be 'attention_mask' or a function, not {token_mask!r}")
    directory = Path(directory)
    dtype = None if dtype is None else torch_dtype(dtype)
    selection = Selection(checked_names(names_filter, model), dtype, transform, token_mask)
    bar = hf_logging.tqdm(batches, "Activations", unit=" batches", disable=not progress)
    # Inference tensors do not say if a transform changes them.
    with torch.inference_mode(False), torch.no_grad(), locked(directory):
        saving = _Save(model, bar, selection, arguments, directory)
        index = saved_index(directory, resume)
        if resume and index is None:
            _log.warning("resume=True, but %s has no activations: starting at batch 0", directory)
        saving.begin(index, parse_bytes(shard_size, "shard_size"))
        try:
            saving.run(n_runs)
        except (OSError, RuntimeError, KeyboardInterrupt) as error:
            n_saved = read_index(directory).n_examples
            remedy = "the same call with resume=True saves the rest"
            note(error, f"{n_saved} examples are complete in {directory}: {remedy}")
            raise
    return load_activations(directory)


_CHANGE_WHAT_IS_STORED = (  # arguments of `run_with_cache` and of the forward
    *("attention_mask", "batch_size", "incl_bwd", "padding_side", "pos_slice", "prepend_bos"),
    "remove_batch_dim",
)
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
        raise FileNotFoundError(
            f"{directory / index.shards[first].file} is missing, and resume=True computes only the "
            "last shards again: put it back, or give another directory"
        )
    return replace(index, shards=index.shards[:first], is_complete=False)


class _Save:
    """One call of `save_activations`."""

    def __init__(
        self,
        model: Model,
        batches: Iterable[object],
        selection: Selection,
        arguments: dict[str, Any],
        directory: Path,
    ) -> None:
        self._model, self._selection, self._directory = model, selection, directory
        self._batches = read_batches(batches, selection)
        self._arguments = arguments

    def begin(self, saved: Index | None, shard_bytes: int) -> None:
        """Run the first batch; then write an empty index, or compare with the one on disk."""
        batch = next(self._batches, None)
        if batch is None:
            raise ValueError(
                "batches has no batch: give at least one (a generator is empty after its first use)"
            )
        self._first = batch
        n_examples, self._width = batch.inputs.shape
        # pipeline_map runs this batch too, so that hooks behave as on the others.
        (tensors,) = pipeline_map(self._model, self._forward, [batch], max_in_flight=1)
        self._entries = self._selection.entries_of(tensors, batch)
        if not any(name.startswith("unembed") for name in tensors):  # nobody reads the logits
            self._arguments = {"return_type": None, **self._arguments}

        entries = (
            *(
                StoredTensor(n, dtype_name(t.dtype), tuple(t.shape[1:]))
                for n, t in batch.stored.items()
            ),
            *self._entries.values(),
        )
        rows = {"example": 1, "token": self._width}  # an upper bound: fewer tokens may be saved
        example_bytes = sum(entry.row_bytes * rows[entry.axis] for entry in entries)
        # An example is never split across shards, so a shard has at least one.
        per_shard = max(1, shard_bytes // example_bytes)
        made_by = versions(("tl_devicefix", "transformer_lens", "torch"))
        index = Index(_model_fields(self._model), made_by, entries, per_shard)
        self._index = index if saved is None else saved
        if saved is None:
            write_index(self._directory, index)
        elif changed := _changed(_compared(saved), _compared(index)):
            raise self._differing(changed)
        # `_run` uses these instead of running the first batch again.
        is_on_disk = saved is not None and saved.n_examples >= n_examples
        self._first_tensors = {} if is_on_disk else tensors

    def run(self, max_in_flight: int) -> None:
        """Save the batches that are not on disk yet."""
        before: Copied | None = None
        is_complete = False
        writer = Writer(self._directory, self._index, max_in_flight + 3)
        try:
            batches = self._remaining(writer)
            # Any: `Iterator` declares no `close`.
            results: Any = pipeline_map(self._model, self._run, batches, max_in_flight)
            with contextlib.closing(results):
                for copied in results:
                    writer.put(copied)
                    if before is not None:  # let the devices wait for slow copies too
                        before.wait()
                    before = copied
            is_complete = not self._index.is_complete
        finally:
            writer.close(is_complete)

    def _remaining(self, writer: Writer) -> Iterator[TokenBatch]:
        """Yield the batches that are not on disk yet; compare the tokens of the others."""
        seen, on_disk_already = 0, self._index.n_examples
        on_disk = SavedActivations(self._directory, self._index).stored
        for number, batch in enumerate(chain([self._first], self._batches)):
            n_examples, width = batch.inputs.shape
            if width != self._width:
                raise ValueError(
                    f"batch {number} has {width} tokens in a row, but those before it have "
                    f"{self._width}: pad all to one width, or save it to another directory"
                )
            skip = min(max(on_disk_already - seen, 0), n_examples)
            for name, rows in batch.stored.items() if skip else ():
                if not torch.equal(on_disk[name][seen : seen + skip], rows[:skip]):
                    raise self._differing(
                        f"from example {seen} on, batches has other values of {name}, or a shard "
                        "is damaged (load_activations(directory).verify() finds it)"
                    )
            seen += n_examples
            if skip == n_examples:
                continue
            if self._index.is_complete:
                raise self._differing(
                    f"they are complete with {on_disk_already} examples, but batches has more"
                )
            # Make room before the batch runs: the devices have to wait for a slow disk.
            writer.make_room(n_examples - skip)
            yield batch._replace(skip=skip)
        if seen < on_disk_already:
            raise self._differing(f"they have {on_disk_already} examples, but batches has {seen}")

    def _run(self, view: Model, batch: TokenBatch) -> Copied:
        """Run a batch, and start copying its activations to CPU memory."""
        if batch.inputs is self._first.inputs and self._first_tensors:  # `begin` has run it
            tensors, self._first_tensors = self._first_tensors, {}
        else:
            tensors = self._forward(view, batch)
        if changed := _changed(self._entries, self._selection.entries_of(tensors, batch)):
            raise ValueError(f"{changed} in this batch: save such batches to another directory")
        copies, arrivals = start_copies(tensors)
        n_examples, width = batch.inputs.shape
        counts = [width] * n_examples if batch.saved is None else batch.saved.sum(1).tolist()
        return Copied({**batch.stored, **copies}, counts, batch.skip, arrivals)

    def _forward(self, view: Model, batch: TokenBatch) -> dict[str, torch.Tensor]:
        home = home_of(view)  # a Bridge on one device does not move what it is given
        arguments = {name: value.to(home) for name, value in batch.arguments.items()}
        _, cache = view.run_with_cache(
            batch.inputs.to(home),
            names_filter=self._selection.names_filter,
            return_cache_object=False,
            **{**self._arguments, **arguments},
        )
        return self._selection.select(cache, batch)

    def _differing(self, difference: str) -> ValueError:
        """Return the error for a call that differs from the one on disk."""
        return ValueError(
            f"the activations in {self._directory} are not those of this call: {difference}; "
            "repeat the first call's model, arguments, batches and versions, or give another "
            "directory"
        )


def _model_fields(model: Model) -> dict[str, object]:
    """Return a model's name, class and shapes for the index."""
    config = model.cfg
    return {
        "name": str(getattr(config, "model_name", "")),
        "class": type(model).__name__,
        "dtype": str(getattr(config, "dtype", "")).removeprefix("torch."),
        **{name: getattr(config, name, None) for name in _FIELDS},
    }


def _compared(index: Index) -> dict[str, str]:
    """Return the values of an index that must not change, by their names in messages."""
    return {
        **{f"the model's {name}": str(value) for name, value in index.model.items()},
        **{f"the version of {name}": version for name, version in index.made_by.items()},
        **{entry.name: str(entry) for entry in index.entries},
    }


def _changed(before: Mapping[str, object], now: Mapping[str, object]) -> str | None:
    """Return a clause about the first value that differs; None if none does."""
    for name in {**before, **now}:
        if before.get(name) != now.get(name):
            return f"{name} was {before.get(name, 'not saved')}, but is {now.get(name, 'missing')}"
    return None

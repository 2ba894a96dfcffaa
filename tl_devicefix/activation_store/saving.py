"""`save_activations`: the activations of many batches, written while the next ones are computed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from inspect import signature
from pathlib import Path
from typing import Any

import torch

from tl_devicefix.activation_store import beginning
from tl_devicefix.activation_store.batches import Batches
from tl_devicefix.activation_store.forwards import Forwards
from tl_devicefix.activation_store.keeping import Keep, Keeping, Reduce
from tl_devicefix.activation_store.loading import SavedActivations, load_activations
from tl_devicefix.activation_store.under_way import UnderWay
from tl_devicefix.activation_store.wanted import wanted_of
from tl_devicefix.checkpoints.configs import torch_dtype
from tl_devicefix.misspelt import refuse_misspelt
from tl_devicefix.pipelining.viewing import viewing
from tl_devicefix.placement.memory import bytes_of


def save_activations(
    model: Any,
    batches: Iterable[Any],
    names_filter: Any = None,
    *,
    directory: str | os.PathLike[str],
    batch_size: int = 8,
    prepend_bos: bool | None = None,
    dtype: torch.dtype | str | None = None,
    transform: Reduce | Mapping[str, Reduce] | None = None,
    token_mask: Keep | None = None,
    resume: bool = False,
    shard_size: int | str = "512MiB",
    max_in_flight: int | None = None,
    progress: bool = True,
    **arguments: Any,
) -> SavedActivations:
    """Run a model on batches, and write activations to a directory while the next batch is run.

    Activations are copied to host memory on a stream of their own, and written by a thread. When
    the disk is slower than the devices, the devices wait: host memory holds two shards and some
    batches, however many there are. Over several devices, runs are in flight (`pipeline_map`).

    A harvest that ended early, in whatever way, is whole as far as its index says; the same call
    with ``resume=True`` goes on, and ends with the same bytes. It runs the first batch again, and
    then those that are not written, and reads `batches` from the beginning to compare the tokens.

    Args:
        model: a HookedTransformer or TransformerBridge, on any number of devices.
        batches: each is tokens `[batch, pos]`, a list of texts, or a dict with "tokens" or
            "input_ids" and, if there is padding, "attention_mask", as a DataLoader yields them. Or
            examples, of which batches are made: tokens `[pos]`, texts, or dicts of those, as a
            `datasets.Dataset` yields them. All have as many tokens.
        names_filter: which activations: a name, names, or a function of a name. By default all.
        directory: is made if it is not there.
        batch_size: how many examples make a batch.
        prepend_bos: for texts, as the model's forward takes it.
        dtype: to which activations are converted on their device. By default as they are computed,
            bit for bit.
        transform: a function of an activation, called on its device: what it returns,
            `[batch, ...]`, is stored in its place. Or a dict from names to such functions.
        token_mask: which tokens' activations are stored: a function of tokens `[batch, pos]` (on
            the CPU) that returns booleans of that shape, or "attention_mask" for all but padding.
        resume: go on with what is there, if anything is.
        shard_size: bytes of a file, or "512MiB": a shard has as many examples as fit, at least one.
        max_in_flight: how many runs are in flight; see `pipeline_map`.
        progress: show a bar with examples, tokens and bytes a second.
        arguments: of the forward, as `stop_at_layer`.

    Returns:
        What was written, as `load_activations` opens it.

    Raises:
        TypeError: for a model of neither class, an item that is no batch, a `transform` that
            returns no tensor, or arguments that would change what a run leaves behind.
        ValueError: for batches of different widths; nothing that is kept; what cannot be stored;
            names that the model has not, or does not compute; and, with `resume`, another model,
            filter, dtype or data than what is there: named.
        FileExistsError: if a harvest is there, without `resume`.
        FileNotFoundError: if others than the last of its shards are gone, or all are.
        RuntimeError: if someone else harvests to the directory.
        OSError: if the disk has not the room, before anything is written; or is full.
        HostLost: if one is lost. What was written is whole.
    """
    for name, instead in _INSTEAD.items():
        if name in arguments:
            raise TypeError(f"save_activations() takes no {name}: {instead}")
    viewing(model)  # refuses what is no model
    functions = (save_activations, model.forward)
    refuse_misspelt(
        "save_activations()", arguments, [n for f in functions for n in signature(f).parameters]
    )
    directory = Path(directory)
    source = Batches(batches, model, batch_size, prepend_bos)
    dtype = None if dtype is None else torch_dtype(dtype)
    keeping = Keeping(wanted_of(names_filter, model), dtype, transform, token_mask)
    shard_bytes = bytes_of(shard_size, "shard_size")
    if shard_bytes < 1:
        raise ValueError(f"shard_size={shard_size!r} is no byte: give one or more, as '512MiB'")
    with contextlib.ExitStack() as stack:
        if not resume:
            beginning.what_is_there(directory, resume)  # before a directory is made
        is_new = not directory.exists()
        stack.enter_context(beginning.alone_in(directory))
        stack.callback(beginning.leave_nothing_empty, directory, is_new)
        stack.enter_context(torch.no_grad())
        known = beginning.what_is_there(directory, resume)
        beginning.clear_away(directory)
        forwards = Forwards(model, keeping, arguments, max_in_flight)
        UnderWay(forwards, source, directory, known, shard_bytes).run(progress)
    return load_activations(directory)


_INSTEAD = {
    "remove_batch_dim": "harvest with it, and read h[name][3], or h.cache(3)",
    "stop_at": "give stop_at_layer",
    "attention_mask": "give batches that are dicts with one",
    "fwd_hooks": "add hooks to the model before",
    "return_cache_object": "nothing of a cache is returned",
    "incl_bwd": "gradients are not harvested",
    "padding_side": "set model.tokenizer.padding_side before",
    "pos_slice": "give a transform, such as lambda activation: activation[:, -1]",
}

"""The forwards of a harvest, and what of each is copied to the host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from tl_devicefix.activation_store.batches import Batch
from tl_devicefix.activation_store.copying import Buffer, room_for
from tl_devicefix.activation_store.format import KEPT, MASK, TOKENS, Entry
from tl_devicefix.activation_store.keeping import Found, Keeping, entries_of
from tl_devicefix.activation_store.on_hosts import by_device
from tl_devicefix.activation_store.wanted import refuse_missing
from tl_devicefix.activation_store.writing import Copied
from tl_devicefix.dispatch.carrying import outputs_unread
from tl_devicefix.pipelining.pipeline_map import devices_of, pipeline_map


class Item(NamedTuple):
    """A batch that is run.

    Attributes:
        batch: what the forward is given.
        kept: which tokens are stored, `[batch, pos]`; None for all.
        skip: how many of its examples are written already.
        buffer: where what is kept of it goes to.
    """

    batch: Batch
    kept: torch.Tensor | None
    skip: int
    buffer: Buffer


class Forwards:
    """Runs a model on batches. The first run says what all others are to give.

    Args:
        model: of either class.
        keeping: what is kept of each forward.
        arguments: of the forward.
        max_in_flight: how many runs are in flight; None for `pipeline_map`'s default.

    Attributes:
        groups: what is kept of each, from `first` on.
    """

    def __init__(
        self, model: Any, keeping: Keeping, arguments: dict[str, Any], max_in_flight: int | None
    ) -> None:
        self.model, self.keeping = model, keeping
        self.devices = devices_of(model)
        n_devices = len(self.devices)
        self.max_in_flight = (
            max_in_flight if max_in_flight is not None else n_devices + (n_devices > 1)
        )
        self._arguments = arguments
        self._points = dict(model.hook_dict)

    def first(self, batch: Batch, kept: torch.Tensor | None) -> tuple[Found, tuple[Entry, ...]]:
        """Run the first batch.

        Args:
            batch: what is given to the model.
            kept: which tokens are stored, `[batch, pos]`; None for all.

        Returns:
            What is kept of it, and how it is stored.

        Raises:
            ValueError: if it cannot be stored, or is not all that was named.
        """
        (found,) = pipeline_map(self.model, self._of_forward, [(batch, kept)], max_in_flight=1)
        stop_at_layer = self._arguments.get("stop_at_layer")
        refuse_missing(self.keeping.names_filter, found.names, stop_at_layer)
        self._names = found.names
        n_rows = len(batch.tokens) if kept is None else int(kept.sum())
        entries = entries_of(found, n_rows, kept is not None)
        self._entries = {entry.name: entry for entry in entries if entry.same_as is None}
        self.groups = by_device(found.tensors)
        if "return_type" not in self._arguments and not _has_unembedding(found.names):
            self._arguments = {**self._arguments, "return_type": None}  # logits are not needed
        beside = stored_beside(batch, kept)
        return found, (*(_entry(name, rows) for name, rows in beside.items()), *entries)

    def each(self, items: Iterable[Item], max_in_flight: int | None = None) -> Iterator[Copied]:
        """Run batches, several at once, and start to copy what is kept of each.

        Raises:
            ValueError: if that is not as of the first one.
        """
        return pipeline_map(self.model, self._run, items, max_in_flight or self.max_in_flight)

    def room(self, n_examples: int, width: int) -> list[int]:
        """The sizes of a buffer's parts for so many examples, of which all tokens may be kept."""
        n_rows = {"example": n_examples, "token": n_examples * width, "shared": 1}
        sizes = {name: each.row_bytes * n_rows[each.axis] for name, each in self._entries.items()}
        return [room_for(sizes[name] for name in names) for names in self.groups]

    def copy(self, item: Item, found: Found) -> Copied:
        """Start to copy what is kept of a batch."""
        batch, kept = item.batch, item.kept
        n_examples, width = batch.tokens.shape
        counts = [width] * n_examples if kept is None else kept.sum(1).tolist()
        self._check_shapes(found.tensors, n_examples if kept is None else sum(counts))
        rows = {**stored_beside(batch, kept), **item.buffer.copy(found.tensors)}
        return Copied(rows, counts, item.skip, item.buffer)

    def _run(self, view: Any, item: Item) -> Copied:
        found = self._of_forward(view, (item.batch, item.kept))
        if found.names != self._names:
            raise ValueError("this batch has not the same activations as the first one")
        return self.copy(item, found)

    def _of_forward(self, view: Any, what: tuple[Batch, torch.Tensor | None]) -> Found:
        batch, kept = what
        with outputs_unread():
            _, cache = view.run_with_cache(
                batch.given,
                names_filter=self.keeping.names_filter,
                return_cache_object=False,
                **{**self._arguments, **batch.arguments},
            )
        return self.keeping.of(cache, kept, self._points)

    def _check_shapes(self, found: Mapping[str, torch.Tensor], n_rows: int) -> None:
        for name, entry in self._entries.items():
            shape = entry.shape if entry.axis == "shared" else (n_rows, *entry.shape)
            if tuple(found[name].shape) != shape or found[name].dtype != entry.torch_dtype:
                raise ValueError(
                    f"{name} is {found[name].dtype} {list(found[name].shape)}, but by the first "
                    f"batch it would be {entry.torch_dtype} {list(shape)}"
                )


def stored_beside(batch: Batch, kept: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """What is stored with a batch's activations."""
    beside = {TOKENS: batch.tokens, MASK: batch.mask}
    return beside if kept is None else {**beside, KEPT: kept}


def _entry(name: str, rows: torch.Tensor) -> Entry:
    return Entry(name, str(rows.dtype).removeprefix("torch."), tuple(rows.shape[1:]))


def _has_unembedding(names: Iterable[str]) -> bool:
    return any(name.startswith("unembed") for name in names)

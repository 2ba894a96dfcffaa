"""`load_activations`: open activations on disk, and read only those that you index."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_128

from tl_devicefix.activation_store.format import (
    MASK,
    NOT_BY_TOKEN,
    TOKEN_MASK,
    TOKENS,
    Index,
    Stored,
    read_index,
)
from tl_devicefix.activation_store.token_batches import Groups, TokenBatches
from tl_devicefix.placement.devices import DeviceLike
from tl_devicefix.placement.memory import gib


def load_activations(directory: str | os.PathLike[str]) -> SavedActivations:
    """Open saved activations. This needs no model, and reads only the index.

    Args:
        directory: the one that you gave to `save_activations`.

    Returns:
        The activations by name; a tensor is read when you index it.

    Raises:
        FileNotFoundError: if the directory has no saved activations.
        ValueError: if its index has another version.
    """
    return SavedActivations(Path(directory), read_index(Path(directory)))


class SavedActivations:
    """Activations on disk.

    `saved["blocks.20.hook_resid_post"][3:7]` is a tensor with the rows of examples 3 to 6; see
    `Stored`.

    Attributes:
        directory (Path): the directory that they are in.
        index (Index): the contents of that directory.
        stored (dict[str, Stored]): tokens, masks and activations, by name.
        names (list[str]): the names of the activations, in a cache's order.
        model (dict[str, object]): the name, class and shapes of the model that computed them.
        is_complete (bool): True if all examples of the call are saved.
    """

    def __init__(self, directory: Path, index: Index) -> None:
        self.directory, self.index = directory, index
        self.stored = {entry.name: Stored(directory, index, entry) for entry in index.entries}
        self.names = [name for name in self.stored if name not in (TOKENS, MASK, TOKEN_MASK)]
        self.model = index.model
        self.is_complete = index.is_complete

    def __len__(self) -> int:
        """Return the number of examples."""
        return self.index.n_examples

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __getitem__(self, name: str | tuple[Any, ...]) -> Stored:
        if isinstance(name, tuple):  # as a cache is indexed: saved["resid_post", 2]
            # Import it late: importing TransformerLens takes longer than reading. Versions 2 to 4
            # have this path.
            from transformer_lens.patching import utils

            name = utils.get_act_name(*name)
        if name not in self.names:
            raise KeyError(f"{name} was not saved: see saved.names")
        return self.stored[name]

    @property
    def tokens(self) -> Stored:
        """The tokens, `[examples, pos]`: `saved.tokens[:]`."""
        return self.stored[TOKENS]

    @property
    def masks(self) -> Stored:
        """The attention masks, `[examples, pos]`: False is padding."""
        return self.stored[MASK]

    @property
    def token_mask(self) -> Stored | None:
        """Which tokens' activations were saved, `[examples, pos]`; None if all were."""
        return self.stored.get(TOKEN_MASK)

    def activations(
        self,
        name: str,
        batch_size: int = 4096,
        shuffle: bool = True,
        seed: int = 0,
        device: DeviceLike = "cpu",
        epochs: int | None = 1,
    ) -> TokenBatches:
        """Return batches of tokens' activations, for SAELens's SAETrainer or dictionary_learning.

        Args:
            name: the activation's name.
            batch_size: the number of tokens in a batch.
            shuffle: True for a random order, each token once an epoch (`TokenBatches` says how);
                False for the order on disk.
            seed: the seed of the order.
            device: the device of the batches.
            epochs: the number of epochs; None for batches without end.

        Returns:
            An iterator of tensors `[batch_size, ...]`. A row is a token if the stored examples are
            `[pos, ...]`; this is told by the size of their first dimension. Otherwise a row is an
            example: for attention patterns and scores, or if `transform` removed `pos`.
        """
        stored, width = self[name], self.tokens.entry.shape[0]
        shape = stored.entry.shape
        # [examples, pos, ...], unless `transform` removed the token axis
        by_token = len(shape) > 1 and shape[0] == width and not name.endswith(NOT_BY_TOKEN)
        # A save that was interrupted early has no shards.
        largest = max((shard.bytes for shard in self.index.shards), default=1)
        # Three groups and the batches take less than two shards.
        groups = Groups(stored, by_token, largest // 2, shuffle, seed)
        return TokenBatches(groups, batch_size, device, epochs)

    def verify(self) -> list[str]:
        """Read all shards, and compare them with their checksums.

        Only this finds values that changed on disk: reading compares no checksums.

        Returns:
            A sentence for each shard that is not as it was written; empty if all are.
        """
        wrong = []
        for shard in self.index.shards:
            path = self.directory / shard.file
            if not path.is_file():
                wrong.append(f"{shard.file} is missing")
            elif (
                path.stat().st_size != shard.bytes
                or xxh3_128(np.memmap(path, mode="r").data).hexdigest() != shard.xxh3_128
            ):
                wrong.append(f"{shard.file} is damaged: it is not as it was written")
        return wrong

    def __repr__(self) -> str:
        index = self.index
        state = "all saved" if self.is_complete else "not complete: save the rest with resume=True"
        versions = ", ".join(f"{name} {version}" for name, version in index.made_by.items())
        lines = [
            f"{len(self)} examples of {self.model['name']} ({self.model['class']}), {state}",
            f"{gib(sum(shard.bytes for shard in index.shards))}, by {versions}",
            *(f"  {stored!r}" for stored in self.stored.values()),
        ]
        return "\n".join(lines)

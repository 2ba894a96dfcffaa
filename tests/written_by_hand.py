"""Saved activations written without a model, and the files of a directory."""

from __future__ import annotations

from pathlib import Path

import torch

from tl_devicefix import load_activations
from tl_devicefix.activation_store.format import (
    LOCK,
    MASK,
    TOKENS,
    Index,
    StoredTensor,
    write_index,
)
from tl_devicefix.activation_store.reader import SavedActivations
from tl_devicefix.activation_store.writer import Copied, Writer

RESID, REDUCED = "blocks.0.hook_resid_post", "blocks.1.hook_resid_post"
N_EXAMPLES, WIDTH, D_MODEL = 11, 6, 4
PER_SHARD = 4
MODEL = {"name": "none", "class": "none", "n_layers": 2, "d_model": D_MODEL}


def write_by_hand(directory: Path, dtype: torch.dtype = torch.bfloat16) -> SavedActivations:
    """Activations of eleven examples in three shards.

    In `RESID`, each of a token's four values is the token's number, counted across examples.
    `REDUCED` has one value for each example, the example's number, and no token axis.
    """
    directory.mkdir(exist_ok=True)
    name = str(dtype).removeprefix("torch.")
    entries = (
        StoredTensor(TOKENS, "int64", (WIDTH,)),
        StoredTensor(MASK, "bool", (WIDTH,)),
        StoredTensor(RESID, name, (WIDTH, D_MODEL)),
        StoredTensor(REDUCED, "float32", (1,)),
    )
    index = Index(MODEL, {}, entries, PER_SHARD)
    write_index(directory, index)
    writer = Writer(directory, index, 3)
    numbers = torch.arange(N_EXAMPLES * WIDTH).view(N_EXAMPLES, WIDTH)
    examples = torch.arange(N_EXAMPLES)
    for rows in examples.split(3):
        writer.make_room(len(rows))
        tensors = {
            TOKENS: numbers[rows],
            MASK: torch.ones(len(rows), WIDTH, dtype=torch.bool),
            RESID: numbers[rows].to(dtype)[..., None].repeat(1, 1, D_MODEL),
            REDUCED: rows.float()[:, None],
        }
        writer.put(Copied(tensors, [WIDTH] * len(rows)))
    writer.close(is_complete=True)
    return load_activations(directory)


def files(directory: Path) -> dict[str, bytes]:
    """Return the bytes of the files that a reader sees in a directory, by name."""
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name != LOCK}

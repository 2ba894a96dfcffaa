"""A harvest as a Hugging Face data set, as SAELens's runs take activations that were cached."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import datasets
import torch

from tl_devicefix.activation_store.format import Index
from tl_devicefix.activation_store.stored import Stored

_ARRAYS = {2: datasets.Array2D, 3: datasets.Array3D, 4: datasets.Array4D, 5: datasets.Array5D}
TOKEN_IDS = "token_ids"
"""What SAELens calls tokens."""


def to_dataset(
    stored: Mapping[str, Stored],
    tokens: Stored,
    index: Index,
    dtype: torch.dtype,
    cache_dir: str | os.PathLike[str] | None,
) -> datasets.Dataset:
    """A data set with a row for each example: its activations by their names, and its tokens.

    Args:
        stored: by name.
        tokens: of the examples.
        index: of the harvest.
        dtype: of floating-point activations.
        cache_dir: where the data set is written; by default where data sets are.

    Raises:
        ValueError: for a dtype that Arrow has not, or activations with a row for each token.
    """
    if dtype not in (torch.float16, torch.float32, torch.float64):
        raise ValueError(f"a data set cannot hold {dtype}: give torch.float32 or torch.float16")
    dtypes = {}
    for name, each in stored.items():
        if each.entry.axis != "example":
            raise ValueError(
                f"{name} has no row for each example, so a data set cannot hold it: leave it out, "
                "and save without token_mask"
            )
        dtypes[name] = dtype if each.dtype.is_floating_point else each.dtype
    features = {
        name: _feature(each.entry.shape, str(dtypes[name]).removeprefix("torch."))
        for name, each in stored.items()
    }
    features[TOKEN_IDS] = _feature(tokens.entry.shape, "int32")
    # Tells data sets from each other; in a list, each would be what one of several processes gets.
    of = {"checksums": " ".join(shard.xxh3_128 for shard in index.shards)}
    return datasets.Dataset.from_generator(
        _Rows(stored, tokens, dtypes, index.examples_per_shard),
        features=datasets.Features(features),
        cache_dir=None if cache_dir is None else os.fspath(cache_dir),
        gen_kwargs=of,
    )


class _Rows:
    """Generates rows, of which a few are in memory."""

    def __init__(
        self,
        stored: Mapping[str, Stored],
        tokens: Stored,
        dtypes: Mapping[str, torch.dtype],
        at_once: int,
    ) -> None:
        self._stored, self._tokens, self._dtypes = dict(stored), tokens, dict(dtypes)
        self._at_once = min(at_once, 64)

    def __call__(self, checksums: str) -> Iterator[dict[str, Any]]:
        for start in range(0, len(self._tokens), self._at_once):
            rows = slice(start, start + self._at_once)
            read = {n: each[rows].to(self._dtypes[n]).numpy() for n, each in self._stored.items()}
            read[TOKEN_IDS] = self._tokens[rows].int().numpy()
            for number in range(len(read[TOKEN_IDS])):
                yield {name: values[number] for name, values in read.items()}


def _feature(shape: tuple[int, ...], dtype: str) -> Any:
    if len(shape) > 1:
        return _ARRAYS[len(shape)](shape=shape, dtype=dtype)
    value = datasets.Value(dtype)
    return datasets.Sequence(value, length=shape[0]) if shape else value

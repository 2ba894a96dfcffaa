"""Activations of devices of several ranks are saved to the bytes of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from hf_models import N_LAYERS
from ranks import devices_of
from written_by_hand import files

import tl_devicefix
from tl_devicefix import save_activations
from tl_devicefix.multihost.init_hosts import Ranks

STOP = N_LAYERS - 1  # after the last one, a Bridge goes on to what is behind the blocks
NEAR, FAR = "blocks.0.hook_resid_post", f"blocks.{STOP - 1}.hook_resid_post"
SIZE = 6000
"""Of a shard: two to three examples of two activations, where a batch has two."""

CASES: dict[str, dict[str, Any]] = {
    "two": {"names_filter": [NEAR, FAR], "stop_at_layer": STOP},
    "none of a shard's tokens": {
        "names_filter": [NEAR, FAR],
        "token_mask": lambda tokens: (tokens == tokens[0, 0]) & (tokens[0, 0] % 2 == 0),
    },
    "of two dtypes": {"names_filter": [NEAR, FAR], "transform": {NEAR: lambda a: a.half()}},
}


def save(model: Any, tokens: torch.Tensor, directory: Path, case: str) -> Any:
    batches = [tokens.roll(shift, 1) for shift in range(5)]
    options = {"directory": directory, "shard_size": SIZE, **CASES[case]}
    return save_activations(model, batches, progress=False, **options)


def test_the_same_bytes(
    ranks: Ranks, load_over_entered: Any, tokens: torch.Tensor, tmp_path: Path
) -> None:
    with tl_devicefix.simulate(4):
        model = load_over_entered("llama")
        for case in CASES:
            save(model, tokens, tmp_path / "one process" / case, case)

    with ranks.entered(devices_of(ranks, ["4GiB"] * 4)):
        model = load_over_entered("llama")
        for case in CASES:
            result = save(model, tokens, tmp_path / case, case)
            assert files(tmp_path / case) == files(tmp_path / "one process" / case)
            assert len(result.index.shards) > 1
            assert result.verify() == []

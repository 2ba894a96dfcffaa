"""Activations of devices of several ranks are saved to the bytes of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
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


@pytest.fixture(scope="module")
def batches(tokens: torch.Tensor) -> list[torch.Tensor]:
    return [tokens.roll(shift, 1) for shift in range(5)]


@pytest.fixture(scope="module")
def load(
    ranks: Ranks, load_over_entered: Any, batches: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Any, Path]]:
    """A model over four devices of two processes, and where one process has written each case."""
    directory = tmp_path_factory.mktemp("in_one_process")
    with tl_devicefix.simulate(4):
        model = load_over_entered("llama")
        for name, options in CASES.items():
            run(model, batches, directory / name, **options)
    with ranks.entered(devices_of(ranks, ["4GiB"] * 4)):
        yield load_over_entered("llama"), directory


def run(model: Any, batches: Any, to: Path, **options: Any) -> Any:
    return save_activations(
        model, batches, directory=to, progress=False, **{"shard_size": SIZE, **options}
    )


@pytest.fixture
def model(load: tuple[Any, Path]) -> Any:
    return load[0]


@pytest.fixture
def expected(load: tuple[Any, Path]) -> Callable[[str], dict[str, bytes]]:
    """What one process has written of a case."""
    return lambda case: files(load[1] / case)


@pytest.mark.parametrize("case", CASES)
def test_the_same_bytes(case: str, model: Any, batches: Any, expected: Any, tmp_path: Path) -> None:
    result = run(model, batches, tmp_path, **CASES[case])

    assert files(tmp_path) == expected(case)
    assert len(result.index.shards) > 1
    assert result.verify() == []

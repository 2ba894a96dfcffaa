"""`save_activations` over devices that compute later, with streams and pinned memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from written_by_hand import assert_same_bits

import tl_devicefix
from tl_devicefix.simulation.machine import Machine

SMALL = 8000
"""A shard's bytes, so that there are several of all activations of the tiny models."""


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    """Devices that compute later than they are told to, with streams and pinned memory."""
    with tl_devicefix.simulate(4, asynchronous=True) as machine:
        yield machine


def test_activations_over_devices_are_those_of_a_loop_bit_for_bit(
    machine: Machine, folded: Any, batches: Any, run: Any
) -> None:
    model = folded("llama", 4)
    names = [name for name in model.hook_dict if name.endswith(("resid_post", "pattern"))]
    expected = [model.run_with_cache(batch, names_filter=names)[1] for batch in batches]

    result = run(model, batches, names, shard_size=SMALL)

    assert len(result.index.shards) > 2
    assert result.names == [name for name in expected[0] if name in names]  # but for aliases
    assert result.is_complete
    start = 0
    for cache in expected:
        stop = start + len(cache["resid_post", 0])
        read = result.cache(slice(start, stop))
        for name in result.names:
            assert_same_bits(read[name], cache[name])
        start = stop
    assert torch.equal(result.tokens[:], torch.cat(batches))
    assert not [
        t for t in threading.enumerate() if t.name.startswith(("activations", "pipeline_map"))
    ]

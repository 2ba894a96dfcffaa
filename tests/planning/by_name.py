"""Models that load by name without a network, and the peak memory of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import transformers

from tl_devicefix.monkeypatch.versions import has_hooked_transformer

CONFIG: Any = transformers.GPT2Config(n_layer=4, n_embd=8, n_head=2, vocab_size=11, n_positions=16)
"""A small model's config: a HookedTransformer's, or a Bridge's with TransformerLens 4."""
if has_hooked_transformer():
    from architectures import toy_config

    CONFIG = toy_config(act_fn="relu", d_mlp=24)
a_bridge_by_name = pytest.mark.skipif(
    has_hooked_transformer(), reason="names are loaded as a TransformerBridge in TransformerLens 4"
)


def layers(count: int, called: str = "num_hidden_layers") -> dict[str, Any]:
    """Return the options that load `count` layers; `called` is their name in a Bridge's config."""
    if has_hooked_transformer():
        return {"first_n_layers": count}
    return {"hf_config_overrides": {called: count}}


def peaks_of(machine: Any, run: Callable[[], Any]) -> list[int]:
    """Return the peak memory of each device during a run, its result included."""
    devices = range(len(machine.devices))
    for index in devices:
        machine.reset_peak_memory_stats(index)
    _kept = run()
    return [machine.max_memory_allocated(index) for index in devices]

"""The check of a TransformerBridge on a tiny model: see `tl_devicefix/twin.py`.

A Bridge computes parts of attention, norms and activations itself, from its own config. So it can
be wrong as booted, or only once its weights are processed. The tiny Bridge runs with and without
hooks on its patterns.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any

import torch
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module
from transformers import PretrainedConfig

from tl_devicefix.transformer_bridge.components import adapter_for, hf_model_class
from tl_devicefix.twin import OnMismatch, Twin, check_numbers

EXTRA_PARTS = "_tl_devicefix_extra_parts"
"""A Bridge's attribute with the parts of its `hf_model` that its config does not describe."""


def check_bridge_numbers(
    hf_config: PretrainedConfig,
    name: str,
    on_mismatch: OnMismatch | None = None,
    compatibility: Mapping[str, Any] | None = None,
) -> str | None:
    """Warn or raise if a Bridge of this config would not give transformers' numbers.

    See `check_numbers`. `compatibility` are the arguments of `enable_compatibility_mode`; None
    for a Bridge as booted.
    """
    called = f"{name} as a TransformerBridge"
    called += "" if compatibility is None else " in compatibility mode"
    advice = "compare what you need with transformers"
    measure = functools.partial(difference, hf_config, name, compatibility)
    return check_numbers(measure, called, on_mismatch, advice)


def difference(
    hf_config: PretrainedConfig, name: str, compatibility: Mapping[str, Any] | None
) -> float:
    """Return how far a tiny Bridge's numbers are from transformers'; see `Twin.difference`."""
    adapter = adapter_for(hf_config, name, torch.float32)
    twin = Twin.of(hf_config, adapter.cfg.n_ctx, hf_model_class(adapter))
    wrapped = copy.deepcopy(twin.hf_model)
    wrapped.config.output_attentions = True  # as in `boot_transformers`
    bridge: Any = build_bridge_from_module(
        wrapped,
        str(adapter.cfg.architecture),
        hf_config=wrapped.config,
        dtype=torch.float32,
        device="cpu",
        model_name=name,
    )
    if compatibility is not None:
        bridge.enable_compatibility_mode(**compatibility, on_mismatch="ignore")
    plain = twin.difference(bridge(twin.tokens))
    # Hooks that change nothing make the Bridge compute its own patterns.
    patterns = [
        (point, lambda x, hook: x) for point in bridge.hook_dict if point.endswith("pattern")
    ]
    hooked = twin.difference(bridge.run_with_hooks(twin.tokens, fwd_hooks=patterns))
    return max(plain, hooked)

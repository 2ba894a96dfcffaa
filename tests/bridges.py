"""Where accelerate's "balanced" puts the modules of a Hugging Face model."""

from __future__ import annotations

from typing import Any

from hf_models import N_LAYERS

MODULES = {
    "llama": (("model.embed_tokens", "model.rotary_emb", "lm_head"), "model.layers", "model.norm"),
    "gpt2": (
        ("transformer.wte", "transformer.wpe", "transformer.drop", "lm_head"),
        "transformer.h",
        "transformer.ln_f",
    ),
}
"""Modules of Hugging Face models: those at home, the blocks, and the final norm."""


def balanced_map(name: str, devices: list[Any]) -> dict[str, str]:
    """A `device_map` for transformers, as accelerate's "balanced": the final norm lies last.

    That is not where the package's own plan puts it.
    """
    first, blocks, last = MODULES.get(name, MODULES["llama"])
    device_map = dict.fromkeys(first, str(devices[0]))
    for layer in range(N_LAYERS):
        device_map[f"{blocks}.{layer}"] = str(devices[layer * len(devices) // N_LAYERS])
    return {**device_map, last: str(devices[-1])}

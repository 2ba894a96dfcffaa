"""Hugging Face's placement of a model over devices: what accelerate's "balanced" comes to."""

from __future__ import annotations

from typing import Any

from hf_models import N_LAYERS

_EMBED = {"gpt2": ["transformer.wte", "transformer.wpe"]}
_NORM = {"gpt2": "transformer.ln_f"}
_BLOCKS = {"gpt2": "transformer.h"}


def dispatched(name: str, devices: list[Any]) -> dict[str, str]:
    """A `device_map` for transformers: blocks in ranges, the final norm with the last of them.

    The unembedding is with the embedding, as tied weights have to be.
    """
    last = len(devices) - 1
    spread = {path: str(devices[0]) for path in _EMBED.get(name, ["model.embed_tokens"])}
    for layer in range(N_LAYERS):
        index = layer * len(devices) // N_LAYERS
        spread[f"{_BLOCKS.get(name, 'model.layers')}.{layer}"] = str(devices[index])
    spread[_NORM.get(name, "model.norm")] = str(devices[last])
    if name != "gpt2":
        spread["model.rotary_emb"] = str(devices[0])
    return {**spread, "lm_head": str(devices[0])}

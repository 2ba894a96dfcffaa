"""Kinds of models, and ways to split them across devices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import devices
import pytest
import torch
import transformer_lens
from architectures import ALL_ARCHITECTURES, NO_PROCESSING, TOYS, build_toy, load_hooked
from model_classes import HookedTransformer
from transformer_lens import loading_from_pretrained as tl_loading

from tl_devicefix.hooked_transformer.components import IS_2

KINDS: dict[str, tuple[str, dict[str, bool]]] = {
    "llama": ("llama", {}),  # RMSNorm, rotary positions, grouped-query attention
    "gpt2": ("gpt2", {}),  # LayerNorm, absolute positions
    "bloom": ("bloom", {}),  # ALiBi
    "unfolded pythia": ("pythia", NO_PROCESSING),  # attention and MLP side by side
    "attention-only": ("attention-only", {}),  # built from a config
}
"""Kind of model -> its architecture, and how it is loaded."""

SCATTERED = {
    "embed": 2, "pos_embed": 1, "blocks": 3, "blocks.0": 1, "blocks.1": 0, "blocks.2": 1,
    "ln_final": 0, "unembed": 1,
}  # fmt: skip
"""A device_map that goes back and forth between devices; home is the third one."""

Spread = int | str
"""The number of devices that a model is split across, or "scattered"."""


def where_to(architecture: str, spread: Spread) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that split this architecture so."""
    if spread != "scattered":
        return {"n_devices": spread}
    left_out = () if architecture in ("gpt2", "bloom") else ("pos_embed",)
    return {"device_map": {name: at for name, at in SCATTERED.items() if name not in left_out}}


def load_kind(
    kind: str,
    source: Callable[[str], Any],
    tokenizer: Any,
    spread: Spread | None = None,
    *,
    folded: bool | None = None,
    **options: Any,
) -> HookedTransformer:
    """A model of a kind or an architecture, whose weights are those of `source(architecture)`."""
    if kind in TOYS:
        home = options.get("device") or devices.device(0)
        return build_toy(TOYS[kind](), tokenizer, home, int(spread or 1))
    name, processing = KINDS.get(kind, (kind, {}))
    processing = NO_PROCESSING if folded is False else processing
    options = {**processing, **(where_to(name, spread) if spread else {}), **options}
    architecture = ALL_ARCHITECTURES[name]
    if architecture.official_name not in tl_loading.OFFICIAL_MODEL_NAMES:
        pytest.skip(f"the installed TransformerLens has no {architecture.official_name}")
    model = source(name)
    if isinstance(model, Path):
        return HookedTransformer.from_pretrained(str(model), **options)
    return load_hooked(architecture, model, tokenizer, **options)


def devices_of(model: Any) -> set[str]:
    """Where the model's parameters and buffers are."""
    return {str(tensor.device) for tensor in [*model.parameters(), *model.buffers()]}


def home_of(model: HookedTransformer) -> torch.device:
    """Where tokens go in and logits come out, as the config tells users."""
    home: Any = model.cfg.device
    return torch.device(home)


def new_kv_cache(model: HookedTransformer, batch_size: int) -> Any:
    """An empty KV cache, made as TransformerLens's own demos do."""
    name = f"{'HookedTransformer' if IS_2 else 'TransformerLens'}KeyValueCache"
    cls = getattr(transformer_lens, name)
    return cls.init_cache(model.cfg, model.cfg.device, batch_size)

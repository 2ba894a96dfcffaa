"""HookedTransformers of every kind, and where they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import devices
import pytest
import torch
import transformer_lens
from architectures import NO_PROCESSING, OFFICIAL_NAMES, TOYS, build_toy, load_hooked
from model_classes import HookedTransformer
from transformer_lens import loading_from_pretrained as tl_loading

from tl_devicefix.hooked_transformer.components import IS_2


def load_kind(
    kind: str,
    source: Callable[[str], Any],
    tokenizer: Any,
    *,
    folded: bool | None = None,
    **options: Any,
) -> HookedTransformer:
    """A model of an architecture, whose weights are those of `source(architecture)`, or a toy.

    An "unfolded pythia" is one whose weights are not processed.
    """
    if kind in TOYS:
        home = options.get("device") or devices.device(0)
        return build_toy(TOYS[kind](), tokenizer, home, options.get("n_devices", 1))
    name = kind.removeprefix("unfolded ")
    if name != kind or folded is False:
        options = {**NO_PROCESSING, **options}
    if OFFICIAL_NAMES[name] not in tl_loading.OFFICIAL_MODEL_NAMES:
        pytest.skip(f"the installed TransformerLens has no {OFFICIAL_NAMES[name]}")
    model = source(name)
    if isinstance(model, Path):
        return HookedTransformer.from_pretrained(str(model), **options)
    return load_hooked(name, model, tokenizer, **options)


def home_of(model: HookedTransformer) -> torch.device:
    """Where tokens go in and logits come out, as the config tells users."""
    home: Any = model.cfg.device
    return torch.device(home)


def new_kv_cache(model: HookedTransformer, batch_size: int) -> Any:
    """An empty KV cache, made as TransformerLens's own demos do."""
    name = f"{'HookedTransformer' if IS_2 else 'TransformerLens'}KeyValueCache"
    cls = getattr(transformer_lens, name)
    return cls.init_cache(model.cfg, model.cfg.device, batch_size)

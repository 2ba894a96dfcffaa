"""The check of a HookedTransformer on a tiny model: see `tl_devicefix/twin.py`."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from transformer_lens import HookedTransformer, HookedTransformerConfig
from transformers import PretrainedConfig, PreTrainedModel

from tl_devicefix.checkpoints.sources import HuggingFaceSource
from tl_devicefix.hooked_transformer.components import component_sizes
from tl_devicefix.hooked_transformer.empty_model import empty_model
from tl_devicefix.hooked_transformer.moving import place
from tl_devicefix.hooked_transformer.processing import fill
from tl_devicefix.monkeypatch.versions import has_bridge
from tl_devicefix.placement.deciding import decide_fitting
from tl_devicefix.twin import NEURONS, OnMismatch, Twin, check_numbers
from tl_devicefix.weight_processing import Steps


def check_hooked_numbers(
    hf_config: PretrainedConfig,
    cfg: HookedTransformerConfig,
    steps: Steps,
    on_mismatch: OnMismatch | None = None,
    hf_class: type[PreTrainedModel] | None = None,
) -> str | None:
    """Warn or raise if a HookedTransformer of `cfg` would not give transformers' numbers.

    See `check_numbers`. `hf_class` is the class of the model to convert; by default, the one that
    transformers uses.
    """
    other = "a TransformerBridge, which runs transformers' own code"
    other = other if has_bridge() else "a newer TransformerLens"
    called = f"{cfg.model_name} as a HookedTransformer"
    advice = f"try from_pretrained_no_processing, or use {other}"
    measure = functools.partial(difference, hf_config, cfg, steps, hf_class)
    return check_numbers(measure, called, on_mismatch, advice)


def difference(
    hf_config: PretrainedConfig,
    cfg: HookedTransformerConfig,
    steps: Steps,
    hf_class: type[PreTrainedModel] | None,
) -> float:
    """Return how far the tiny model is from transformers; see `Twin.difference`."""
    twin = Twin.of(
        hf_config,
        cfg.n_ctx,
        hf_class,
        attn_types=cfg.attn_types,
        window=cfg.window_size,
        has_positions=cfg.positional_embedding_type in ("standard", "shortformer"),
    )
    model = _hooked(twin.hf_model, _shrunk(cfg, twin), steps)
    return twin.difference(model(twin.tokens))


def _shrunk(cfg: HookedTransformerConfig, twin: Twin) -> HookedTransformerConfig:
    """Return `cfg` with the sizes of the tiny model."""
    small = twin.hf_model.config
    n_experts = getattr(small, "num_local_experts", None) or getattr(small, "num_experts", None)
    sizes = {
        "n_layers": len(twin.layers),
        "attn_types": cfg.attn_types and [cfg.attn_types[layer] for layer in twin.layers],
        "n_heads": small.num_attention_heads,
        "n_key_value_heads": cfg.n_key_value_heads and small.num_key_value_heads,
        "d_model": small.hidden_size,
        "d_mlp": 4 * small.hidden_size if cfg.d_mlp == 4 * cfg.d_model else NEURONS,
        "d_vocab": small.vocab_size,
        "d_vocab_out": small.vocab_size,
        "n_ctx": twin.n_ctx,
        "num_experts": cfg.num_experts and n_experts,
        "clip_qkv": getattr(small, "clip_qkv", None),
        "window_size": cfg.window_size and twin.windows[cfg.window_size],
        "device": "cpu",
        "n_devices": 1,
        "dtype": torch.float32,
        "tokenizer_name": None,  # the check passes tokens
        "n_params": None,  # the config counts them again
        "seed": None,  # a seed would set the process's random state
    }
    if cfg.original_architecture == "Gemma3ForConditionalGeneration":
        sizes["original_architecture"] = type(twin.hf_model).__name__  # the text model alone
    settings = cfg.to_dict()  # older TransformerLens versions have fewer settings
    return type(cfg).from_dict({name: sizes.get(name, value) for name, value in settings.items()})


def _hooked(hf_twin: nn.Module, cfg: HookedTransformerConfig, steps: Steps) -> HookedTransformer:
    """Make a HookedTransformer from the tiny model's weights, as `from_pretrained` does."""
    model: Any = empty_model(HookedTransformer, cfg, None, hf_model=hf_twin)
    placement = decide_fitting(component_sizes(cfg), n_devices=1, device="cpu")
    fill(model, HuggingFaceSource(hf_twin, cfg), placement, steps)
    place(model, placement)
    return model.eval()

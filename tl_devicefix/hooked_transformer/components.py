"""The components of a HookedTransformer, and their sizes."""

from __future__ import annotations

from dataclasses import replace

import torch
from packaging.version import Version
from torch import nn
from transformer_lens import HookedTransformerConfig
from transformer_lens.components import (
    Embed,
    LayerNorm,
    LayerNormPre,
    PosEmbed,
    RMSNorm,
    RMSNormPre,
    TransformerBlock,
    Unembed,
)

from tl_devicefix.monkeypatch.versions import installed
from tl_devicefix.placement.placement import ComponentSize

IS_2 = installed() < Version("3.dev0")
"""True if TransformerLens 2 is installed."""
POST_NORM = ("Olmo2ForCausalLM", "Olmo3ForCausalLM")
"""TransformerLens's POST_NORM_ARCHITECTURES, whose norms follow attention and MLP."""


def component_names(cfg: HookedTransformerConfig) -> tuple[str, ...]:
    """Return the components of a HookedTransformer with this config, in the order they run."""
    names = ["embed"]
    if cfg.positional_embedding_type != "rotary":  # TransformerLens makes it for ALiBi, too
        names.append("pos_embed")
    names += [f"blocks.{layer}" for layer in range(cfg.n_layers)]
    if cfg.normalization_type is not None:
        names.append("ln_final")
    return (*names, "unembed")


def component_sizes(cfg: HookedTransformerConfig) -> tuple[ComponentSize, ...]:
    """Return the components' sizes, in the order they run.

    We build TransformerLens's own modules on the meta device, so the sizes are right for every
    architecture and version.
    """
    block_sizes: dict[str | None, ComponentSize] = {}
    sizes = []
    for name in component_names(cfg):
        if name.startswith("blocks."):
            kind = attention_kind(cfg, int(name.split(".")[1]))
            if kind not in block_sizes:  # making a module takes time, so make one of each kind
                block_sizes[kind] = _size_on_meta(name, cfg)
            shared = f"{kind or 'global'} attention"
            sizes.append(replace(block_sizes[kind], name=name, shared=shared))
        else:
            sizes.append(_size_on_meta(name, cfg))
    return tuple(sizes)


def attention_kind(cfg: HookedTransformerConfig, layer: int) -> str | None:
    """Return "global" or "local", the only difference between blocks; None if all are global."""
    return cfg.attn_types[layer] if cfg.attn_types else None


def _size_on_meta(name: str, cfg: HookedTransformerConfig) -> ComponentSize:
    module = empty_component(name, cfg)
    weights = sum(p.numel() * p.element_size() for p in module.parameters())
    buffers = sum(b.numel() * b.element_size() for b in module.buffers())
    return ComponentSize(name, weights, buffers)


def empty_component(name: str, cfg: HookedTransformerConfig) -> nn.Module:
    """Make TransformerLens's own module of this name, on the meta device."""
    with torch.device("meta"):  # sizes and classes need no memory
        if name.startswith("blocks."):
            return TransformerBlock(cfg, int(name.split(".")[1]))
        if name == "ln_final":
            return final_norm_class(cfg)(cfg)
        return {"embed": Embed, "pos_embed": PosEmbed, "unembed": Unembed}[name](cfg)


def final_norm_class(cfg: HookedTransformerConfig) -> type[nn.Module]:
    """Return the class of `ln_final`."""
    kind = str(cfg.normalization_type)
    is_rms = kind.startswith("RMS") or cfg.final_rms  # `final_rms` overrides an LN
    if kind.endswith("Pre"):
        return RMSNormPre if is_rms else LayerNormPre
    return RMSNorm if is_rms else LayerNorm

"""The components of a HookedTransformer, and their sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from packaging.version import Version
from torch import nn
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
from tl_devicefix.placement.placement import ComponentSize, component_of

IS_2 = installed() < Version("3.dev0")
"""Whether it is TransformerLens 2, which differs in places."""
POST_NORM = ("Olmo2ForCausalLM", "Olmo3ForCausalLM")
"""TransformerLens's POST_NORM_ARCHITECTURES: norms follow attention and MLP."""


def component_names(cfg: Any) -> tuple[str, ...]:
    """Names of the components of a HookedTransformer with this config, in the order they run."""
    names = ["embed"]
    if cfg.positional_embedding_type != "rotary":
        names.append("pos_embed")
    names += [f"blocks.{layer}" for layer in range(cfg.n_layers)]
    if cfg.normalization_type is not None:
        names.append("ln_final")
    return (*names, "unembed")


def component_sizes(cfg: Any) -> tuple[ComponentSize, ...]:
    """Sizes of the components of a HookedTransformer with this config, in the order they run.

    TransformerLens's own modules are built on the meta device, which allocates nothing, so the
    sizes are right for every architecture and version.
    """
    block_sizes: dict[Any, ComponentSize] = {}
    sizes = []
    for name in component_names(cfg):
        if name.startswith("blocks."):
            kind = attention_kind(cfg, int(name.split(".")[1]))
            if kind not in block_sizes:
                block_sizes[kind] = _size_on_meta(name, cfg)
            size = block_sizes[kind]
            shared = f"{kind or 'global'} attention"
            sizes.append(replace(size, name=name, shared=shared))
        else:
            sizes.append(_size_on_meta(name, cfg))
    return tuple(sizes)


def attention_kind(cfg: Any, layer: int) -> str | None:
    """The kind of attention of a block ("global", "local"), by which alone blocks differ."""
    return cfg.attn_types[layer] if cfg.attn_types else None


def _size_on_meta(name: str, cfg: Any) -> ComponentSize:
    module = empty_component(name, cfg)
    weights = sum(p.numel() * p.element_size() for p in module.parameters())
    buffers = sum(b.numel() * b.element_size() for b in module.buffers())
    return ComponentSize(name, weights, buffers)


def empty_component(name: str, cfg: Any) -> nn.Module:
    """TransformerLens's module of this name, on meta: as it is before anyone changes it."""
    with torch.device("meta"):
        if name.startswith("blocks."):
            return TransformerBlock(cfg, int(name.split(".")[1]))
        if name == "ln_final":
            return final_norm_class(cfg)(cfg)
        return {"embed": Embed, "pos_embed": PosEmbed, "unembed": Unembed}[name](cfg)


def is_own(model: Any, path: str, module: nn.Module) -> bool:
    """Return True if TransformerLens has a module of this class there itself."""
    component = component_of(path)
    try:
        own = empty_component(component, model.cfg).get_submodule(path[len(component) + 1 :])
    except (AttributeError, KeyError):  # no such module, or no such component
        return False
    return type(own) is type(module)


def final_norm_class(cfg: Any) -> type[nn.Module]:
    """The class of `ln_final`: as in HookedTransformer.__init__, `final_rms` makes an LN an RMS."""
    rms = cfg.normalization_type.startswith("RMS") or cfg.final_rms
    if cfg.normalization_type.endswith("Pre"):
        return RMSNormPre if rms else LayerNormPre
    return RMSNorm if rms else LayerNorm

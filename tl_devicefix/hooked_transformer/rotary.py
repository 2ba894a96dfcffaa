"""Rotary tables of models whose frequencies are scaled: YaRN, LongRoPE, linear, dynamic.

TransformerLens knows some of these for some architectures and versions, and silently ignores the
others. transformers' own modules know all of them, so we take the tables from there.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from jaxtyping import Float
from torch import nn

from tl_devicefix.hooked_transformer.components import attention_kind
from tl_devicefix.twin import original_context

_TABLES = ("rotary_sin", "rotary_cos")
_LAYER_TYPES = {"local": "sliding_attention", "global": "full_attention"}


def scale_rotary(model: Any, hf_model: nn.Module) -> None:
    """Give each block's attention transformers' rotary tables, if `hf_model` scales frequencies.

    Blocks of one kind of attention share their tables.
    """
    modules = {
        name.rpartition(".")[2]: module
        for name, module in hf_model.named_modules()
        if type(module).__name__.endswith("RotaryEmbedding") and "vision" not in name
    }
    made: dict[str | None, tuple[Any, ...]] = {}
    for layer, block in enumerate(model.blocks):
        kind = attention_kind(model.cfg, layer)
        # transformers 4 has a module of its own for Gemma 3's local attention.
        own = modules.get(f"rotary_emb_{kind}", modules.get("rotary_emb"))
        if own is None or _scaling(own, kind) in (None, "default"):
            continue
        if kind not in made:
            rotary = ScaledRotary(own, kind)
            tables = [block.attn._buffers[name] for name in _TABLES]
            n_ctx = min(len(tables[0]), rotary.longest or len(tables[0]))
            scaled = rotary(model.cfg.rotary_dim, n_ctx, dtype=tables[0].dtype)
            agree = all(_agree(table[:n_ctx], new) for table, new in zip(tables, scaled))
            made[kind] = () if agree and rotary.longest is None else (rotary, *scaled)
        if made[kind]:
            block.attn.calculate_sin_cos_rotary, *tables = made[kind]
            block.attn._buffers.update(zip(_TABLES, tables))


def _agree(own: torch.Tensor, scaled: torch.Tensor) -> bool:
    """Return True if TransformerLens has this scaling, so that its own tables can stay."""
    rounding = max(1e-3, 2 * torch.finfo(own.dtype).eps)
    # The first rows, because angles of later ones are rounded more.
    return torch.allclose(own[:2048], scaled[:2048], rtol=0, atol=rounding)


def _scaling(module: Any, kind: str | None) -> str | None:
    """The scaling of one kind of attention, by transformers' name; "default" is none."""
    scaling = getattr(module, "rope_type", None)
    return scaling.get(_LAYER_TYPES[kind or "global"]) if isinstance(scaling, dict) else scaling


class ScaledRotary:
    """Computes rotary tables by transformers' module, in place of `calculate_sin_cos_rotary`.

    TransformerLens calls that again for texts that are longer than the tables it has.

    Attributes:
        longest: with LongRoPE and dynamic scaling, longer texts have other frequencies at each
            position, so that one table cannot serve both; otherwise None.
    """

    def __init__(self, module: Any, kind: str | None) -> None:
        # A new one on the CPU, because the model's own may lie anywhere and changes as it runs.
        with torch.device("cpu"):
            self._module = type(module)(module.config)
        by_layer_type = "layer_type" in inspect.signature(module.forward).parameters
        self._layer_type = {"layer_type": _LAYER_TYPES[kind or "global"]} if by_layer_type else {}
        scaling = _scaling(module, kind)
        self.longest: int | None = None
        if scaling == "longrope":
            self.longest = original_context(module.config)
        elif scaling == "dynamic":
            self.longest = module.config.max_position_embeddings

    def __call__(
        self, rotary_dim: int, n_ctx: int, base: float = 10000, dtype: torch.dtype = torch.float32
    ) -> tuple[Float[torch.Tensor, "n_ctx rotary_dim"], Float[torch.Tensor, "n_ctx rotary_dim"]]:
        """See TransformerLens's `calculate_sin_cos_rotary`; the base is transformers' own.

        Raises:
            ValueError: if `n_ctx` is above `longest`.
        """
        if self.longest is not None and n_ctx > self.longest:
            raise ValueError(
                f"this model rotates texts of more than {self.longest} tokens by other "
                "frequencies, and a HookedTransformer has one table: shorten the text, or use "
                "TransformerBridge"
            )
        with torch.device("cpu"):
            like = torch.empty(1, dtype=torch.promote_types(dtype, torch.float32))
            positions = torch.arange(n_ctx)[None]  # [1, n_ctx]
        tables = self._module(like, positions, **self._layer_type)
        # gpt-oss's have one column for both halves.
        cos, sin = (t[0].repeat(1, rotary_dim // t.shape[-1]).to(dtype) for t in tables)
        return sin, cos

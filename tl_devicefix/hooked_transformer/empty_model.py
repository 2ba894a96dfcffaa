"""A HookedTransformer whose parameters have shapes but no values; its buffers are real.

TransformerLens knows scaled rotary frequencies (YaRN, LongRoPE, linear, dynamic) for some
architectures and versions, and silently ignores the others. transformers' own modules know all of
them, so the rotary tables come from there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import nn
from transformer_lens import HookedTransformer, HookedTransformerConfig
from transformer_lens.components import TransformerBlock
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tl_devicefix.checkpoints.hub import has_tokenizer, is_checkpoint_directory
from tl_devicefix.hooked_transformer.components import attention_kind
from tl_devicefix.monkeypatch.applying import replaced_in_thread
from tl_devicefix.placement.workers import one_load
from tl_devicefix.twin import original_context

Table = Float[torch.Tensor, "n_ctx rotary_dim"]
_LAYER_TYPES = {"local": "sliding_attention", "global": "full_attention"}


def empty_model(
    cls: type[HookedTransformer],
    cfg: HookedTransformerConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    default_padding_side: str | None = None,
    hf_model: nn.Module | None = None,
) -> HookedTransformer:
    """Return a model whose parameters have shapes but no values; its buffers are real.

    If `hf_model` scales its rotary frequencies, the rotary tables are those of transformers.
    """
    name = cfg.tokenizer_name or ""
    if tokenizer is None and is_checkpoint_directory(name) and has_tokenizer(name):
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=cfg.trust_remote_code)
    # Never pass None: the defaults of TransformerLens 2 and 3 differ.
    side: dict[str, Any] = (
        {} if default_padding_side is None else {"default_padding_side": default_padding_side}
    )
    with one_load, replaced_in_thread(HookedTransformer, "__init__", _init_without_values):
        model = cls(cfg, tokenizer, move_to_device=False, **side)
    if hf_model is not None and cfg.positional_embedding_type == "rotary":
        _scale_rotary(model, hf_model)
    return model


def _init_without_values(
    original: Callable[..., None], self: HookedTransformer, *args: object, **kwargs: object
) -> None:
    # This wraps HookedTransformer's constructor alone: no checkpoint has values for a subclass's
    # own parameters.
    with torch.device("meta"):
        original(self, *args, **kwargs)
    _give_buffers(self)


def _give_buffers(model: HookedTransformer) -> None:
    """Make a model's buffers on the CPU; blocks of one kind of attention share them."""
    made: dict[str | None, nn.Module] = {}
    for layer, block in enumerate(model.blocks):
        kind = attention_kind(model.cfg, layer)
        if kind not in made:
            # The block's weights are never written, so they take no memory, unless torch's
            # deterministic mode fills them.
            with torch.device("cpu"):
                made[kind] = TransformerBlock(model.cfg, layer)
        for name, module in made[kind].named_modules():
            block.get_submodule(name)._buffers.update(module._buffers)


def _scale_rotary(model: HookedTransformer, hf_model: nn.Module) -> None:
    """Give each block's attention transformers' rotary tables, if `hf_model` scales frequencies.

    Blocks of one kind of attention share their tables.
    """
    modules = {
        name.rpartition(".")[2]: module
        for name, module in hf_model.named_modules()
        if type(module).__name__.endswith("RotaryEmbedding") and "vision" not in name
    }
    made: dict[str | None, tuple[ScaledRotary, tuple[Table, Table]] | None] = {}
    for layer, block in enumerate(model.blocks):
        kind = attention_kind(model.cfg, layer)
        # transformers 4 has a separate module for Gemma 3's local attention.
        module = modules.get(f"rotary_emb_{kind}", modules.get("rotary_emb"))
        if module is None or _rope_type(module, kind) in (None, "default"):
            continue
        attn: Any = block.attn
        if kind not in made:
            rotary, tables = ScaledRotary(module, kind), (attn.rotary_sin, attn.rotary_cos)
            n_ctx = min(len(tables[0]), rotary.longest or len(tables[0]))
            scaled = rotary(attn.cfg.rotary_dim, n_ctx, dtype=tables[0].dtype)
            agree = all(_agree(table[:n_ctx], new) for table, new in zip(tables, scaled))
            made[kind] = None if agree and rotary.longest is None else (rotary, scaled)
        if (scaled_tables := made[kind]) is not None:
            # Replace the method too: TransformerLens calls it again to extend the tables.
            attn.calculate_sin_cos_rotary, (attn.rotary_sin, attn.rotary_cos) = scaled_tables


def _agree(own: Table, scaled: Table) -> bool:
    """Return True if TransformerLens has this scaling, so that its own tables can stay."""
    if own.shape != scaled.shape:  # another d_head: the weights do not fit either
        return False
    rounding = max(1e-3, 2 * torch.finfo(own.dtype).eps)
    # Compare only the first rows: later angles are rounded more.
    return torch.allclose(own[:2048], scaled[:2048], rtol=0, atol=rounding)


def _rope_type(module: nn.Module, kind: str | None) -> str | None:
    """Return the scaling of a kind of attention, by transformers' name; "default" means none."""
    scaling = getattr(module, "rope_type", None)
    return scaling.get(_LAYER_TYPES[kind or "global"]) if isinstance(scaling, dict) else scaling


class ScaledRotary:
    """Computes rotary tables with transformers' module, for `calculate_sin_cos_rotary`.

    Attributes:
        longest: the most tokens that one table serves. With LongRoPE and dynamic scaling, a longer
            text has other frequencies at all positions; with other scalings, this is None.
    """

    def __init__(self, module: Any, kind: str | None) -> None:
        # Make a new module on the CPU: the model's may be anywhere, and its forward changes it.
        with torch.device("cpu"):
            self._module = type(module)(module.config)
        by_layer_type = "layer_type" in inspect.signature(module.forward).parameters
        self._layer_type = {"layer_type": _LAYER_TYPES[kind or "global"]} if by_layer_type else {}
        scaling = _rope_type(module, kind)
        self.longest: int | None = None
        if scaling == "longrope":
            self.longest = original_context(module.config)
        elif scaling == "dynamic":
            self.longest = module.config.max_position_embeddings

    def __call__(
        self, rotary_dim: int, n_ctx: int, base: float = 10000, dtype: torch.dtype = torch.float32
    ) -> tuple[Table, Table]:
        """Return sines and cosines, as `calculate_sin_cos_rotary` does, but ignore `base`.

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
        tables = self._module(like, positions, **self._layer_type)  # [1, n_ctx, rotary_dim] each
        # gpt-oss's tables have half the columns, which apply to both halves of a head.
        cos, sin = (t[0].repeat(1, rotary_dim // t.shape[-1]).to(dtype) for t in tables)
        return sin, cos

"""A HookedTransformer whose parameters have shapes but no values; its buffers are real."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformer_lens import HookedTransformer, HookedTransformerConfig
from transformer_lens.components import TransformerBlock
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tl_devicefix.checkpoints.hub import has_tokenizer, is_checkpoint_directory
from tl_devicefix.hooked_transformer.components import attention_kind
from tl_devicefix.hooked_transformer.rotary import scale_rotary
from tl_devicefix.monkeypatch.applying import replaced_in_thread
from tl_devicefix.placement.workers import one_load


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
        scale_rotary(model, hf_model)
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

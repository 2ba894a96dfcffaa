"""TransformerLens's encoders attend by the same blocks as HookedTransformer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformer_lens import HookedEncoder, HookedEncoderDecoder, HookedTransformerConfig

import tl_devicefix

pytestmark = pytest.mark.filterwarnings("ignore:HookedEncoder:DeprecationWarning")
TOKENS = torch.arange(14).view(2, 7)
SHAPES: dict[str, Any] = {
    "n_layers": 2, "d_model": 16, "n_ctx": 32, "d_head": 8, "n_heads": 2, "d_vocab": 50,
    "d_mlp": 32, "act_fn": "relu", "attention_dir": "bidirectional", "device": "cpu",
}  # fmt: skip


def random_weights(model: Any) -> Any:
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def both_ways(model: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What a model gives with "sdpa", and as installed."""
    with torch.no_grad():
        expected = model(*args, **kwargs)
        with tl_devicefix.attention(model, "sdpa"):
            return model(*args, **kwargs), expected


def test_a_bert_builds_no_pattern(fused_blocks: list[int]) -> None:
    model = random_weights(HookedEncoder(HookedTransformerConfig(**SHAPES)))
    mask = torch.ones_like(TOKENS)
    mask[0, 5:] = 0

    for options in ({}, {"one_zero_attention_mask": mask}):
        actual, expected = both_ways(model, TOKENS, **options)
        assert (actual - expected).abs().max() < 1e-5
    assert len(fused_blocks) == 2 * 2


def test_a_t5_s_relative_biases_are_as_installed(fused_blocks: list[int]) -> None:
    relative = {
        "positional_embedding_type": "relative_positional_bias", "normalization_type": "RMS",
        "relative_attention_max_distance": 16, "relative_attention_num_buckets": 8,
        "use_attn_scale": False, "tie_word_embeddings": True, "decoder_start_token_id": 0,
    }  # fmt: skip
    model = random_weights(HookedEncoderDecoder(HookedTransformerConfig(**SHAPES, **relative)))

    actual, expected = both_ways(model, TOKENS, decoder_input=TOKENS)

    assert torch.equal(actual, expected)
    assert fused_blocks == []
    with tl_devicefix.attention(model, "sdpa") as blocks:
        assert set(blocks.blocks.values()) == {"as installed: it has relative position biases"}

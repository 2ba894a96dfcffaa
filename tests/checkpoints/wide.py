"""Architectures for bitsandbytes: 64 wide, three layers."""

from __future__ import annotations

import transformers
from architectures import Architecture
from hf_models import D_VOCAB, N_CTX

_SIZES = {"vocab_size": D_VOCAB, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


def _mistral() -> transformers.PretrainedConfig:
    return transformers.MistralConfig(
        **_SIZES, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=N_CTX, sliding_window=4,
    )  # fmt: skip


def _gpt2() -> transformers.PretrainedConfig:
    return transformers.GPT2Config(
        **_SIZES, n_embd=64, n_layer=3, n_head=4, n_positions=N_CTX, n_ctx=N_CTX
    )


WIDE = {
    "mistral": Architecture("mistral", "mistralai/Mistral-7B-v0.1", _mistral, {"n_ctx": N_CTX}),
    "gpt2": Architecture("gpt2", "gpt2", _gpt2),
}
"""Models that bitsandbytes can run: its kernel for CPUs wants multiples of 64."""

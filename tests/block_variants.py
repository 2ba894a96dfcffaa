"""Configs of HookedTransformers whose blocks differ, called after models that have such blocks."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

# Of the package nothing is imported, as tests/fuzz runs without it.
IS_2 = version("transformer_lens").startswith("2.")

ROTARY = {"positional_embedding_type": "rotary", "rotary_dim": 4}
LLAMA = {"normalization_type": "RMS", "gated_mlp": True, "n_key_value_heads": 2, **ROTARY}
_LOCAL = {"use_local_attn": True, "window_size": 3, "attn_types": ["local", "global", "local"]}
VARIANTS: dict[str, dict[str, Any]] = {
    "gpt2": {"act_fn": "gelu_new"},
    "gpt2 folded": {"act_fn": "gelu_new", "normalization_type": "LNPre"},
    "llama": LLAMA,
    "llama folded": {**LLAMA, "normalization_type": "RMSPre"},
    "qwen3": {**LLAMA, "use_qk_norm": True},
    "gemma-2": {
        **LLAMA,
        **_LOCAL,
        "use_normalization_before_and_after": True,
        "attn_scores_soft_cap": 5.0,
        "output_logits_soft_cap": 3.0,
    },
    "mistral": {**LLAMA, **_LOCAL, "attn_types": ["local"] * 3},
    "mixtral": {**LLAMA, "num_experts": 3, "experts_per_token": 2},
    "pythia": {**ROTARY, "rotary_dim": 2, "parallel_attn_mlp": True, "act_fn": "gelu"},
    "gpt-j": {
        **ROTARY,
        "rotary_dim": 2,
        "rotary_adjacent_pairs": True,
        "parallel_attn_mlp": True,
        "act_fn": "gelu_new",
    },
    "bloom": {"positional_embedding_type": "alibi", "act_fn": "gelu_fast"},
    "gpt-neo": {**_LOCAL, "use_attn_scale": False, "act_fn": "gelu_new"},
    "attention only": {"attn_only": True, "normalization_type": None},
    "shortformer": {"positional_embedding_type": "shortformer"},
    "bidirectional": {"attention_dir": "bidirectional", "act_fn": "relu"},
    "solu": {"act_fn": "solu_ln"},
}
OF_OLMOE = {"original_architecture": "OlmoeForCausalLM", "clip_qkv": 1.0}
if not IS_2:
    VARIANTS |= {
        "olmo-2": {**LLAMA, "original_architecture": "Olmo2ForCausalLM"},
        "olmoe": {**LLAMA, **OF_OLMOE, "num_experts": 3, "experts_per_token": 2},
        "gpt-oss": {**LLAMA, **_LOCAL, "use_attention_sinks": True},
    }


def config_of(options: dict[str, Any], n_layers: int = 2) -> Any:
    """The config of a tiny model on the CPU whose weights are to be given."""
    from transformer_lens import HookedTransformerConfig

    sizes = {"n_layers": n_layers, "d_model": 16, "n_heads": 4, "d_head": 4, "d_mlp": 24}
    sizes |= {"d_vocab": 40, "n_ctx": 24, "window_size": 4}  # of blocks that are made local
    kind = {"act_fn": "silu", "normalization_type": "LN", "device": "cpu", "init_weights": False}
    options = {**sizes, **kind, **options}
    if "attn_types" in options:
        options["attn_types"] = options["attn_types"][:n_layers]
    return HookedTransformerConfig(**options)

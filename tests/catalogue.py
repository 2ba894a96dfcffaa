"""Tiny models with random weights, one of each architecture that TransformerLens's Bridge knows.

Sizes go by the names that transformers' configs have for them; what an architecture needs besides
is in a table.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from hf_models import D_VOCAB, randomize
from transformer_lens.factories.architecture_adapter_factory import SUPPORTED_ARCHITECTURES

_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 4),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn_hidden_size"), 48),
    **dict.fromkeys(("moe_intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("shared_expert_intermediate_size", "mlp_hidden_size"), 48),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "head_dim"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 64),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), D_VOCAB),
    **dict.fromkeys(("bos_token_id", "decoder_start_token_id"), 0),
    **dict.fromkeys(("eos_token_id",), 1),
    **dict.fromkeys(("pad_token_id",), 2),
    **dict.fromkeys(("ssm_state_size", "state_size", "mamba_d_state"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "mamba_n_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_d_head"), 16),
    "d_kv": 8,
    "rotary_dim": 4,
    "first_k_dense_replace": 1,
    "sliding_window": 4,
    "word_embed_proj_dim": 32,
    "num_hidden_groups": 1,
    "embedding_size": 32,
    "mamba_expand": 2,
    "mamba_d_ssm": 64,
    "chunk_size": 4,
    "mamba_chunk_size": 4,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0,
    "laurel_rank": 4,
    "query_pre_attn_scalar": 8,
    "attention_window": 8,
    "time_step_rank": 4,
    "conv_kernel": 4,
}
_WITHOUT_GROUPS = {"num_key_value_heads": 4, "head_dim": 8}
_ALSO: dict[str, dict[str, Any]] = {
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 2]], "window_size": 4},
    "Mamba2ForCausalLM": {"num_heads": 4, "head_dim": 16, "n_groups": 1, "expand": 2},
    "GPTBigCodeForCausalLM": {"multi_query": True},
    "DeepseekV2ForCausalLM": {**_WITHOUT_GROUPS, "num_experts_per_tok": 2},
    "DeepseekV3ForCausalLM": _WITHOUT_GROUPS,
    "Glm4MoeLiteForCausalLM": _WITHOUT_GROUPS,
    "GlmMoeDsaForCausalLM": _WITHOUT_GROUPS,
    "YoutuForCausalLM": _WITHOUT_GROUPS,
    "BambaForCausalLM": {"attn_layer_indices": [1, 3]},
    "JambaForCausalLM": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "HunYuanDenseV1ForCausalLM": {"head_dim": 8, "num_key_value_heads": 2},
    "NemotronForCausalLM": {"head_dim": 8, "num_key_value_heads": 2},
    "Zamba2ForCausalLM": {
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
        "n_mamba_heads": 4,
        "mamba_headdim": 16,
        "mamba_ngroups": 1,
        "num_mem_blocks": 1,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
        "adapter_rank": 4,
    },
    "GraniteMoeHybridForCausalLM": {
        "layer_types": ["mamba", "attention"] * 2,
        "mamba_n_groups": 1,
        "shared_intermediate_size": 48,
        "position_embedding_type": "rope",  # without, TransformerLens alone does not run it either
    },
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"] * 2},
}
_OF_TEXT = ("ForCausalLM", "LMHeadModel", "ForMaskedLM")


def names() -> list[str]:
    """The architectures of text that transformers has a class for, by its name."""
    present = (name for name in SUPPORTED_ARCHITECTURES if name.endswith(_OF_TEXT))
    return sorted(name for name in present if hasattr(transformers, name))


def make(name: str) -> Any:
    """A tiny model of an architecture."""
    kind = getattr(transformers, name)
    config = kind.config_class()
    fields = {**config.to_dict(), **dict.fromkeys(config.attribute_map)}
    sizes = {key: value for key, value in _SIZES.items() if key in fields}
    sizes = {
        key: value for key, value in sizes.items() if fields[key] is not None or "_token" in key
    }
    sizes = {key: value for key, value in sizes.items() if key not in config.attribute_map}
    if fields.get("layer_types"):
        kinds = list(dict.fromkeys(fields["layer_types"]))
        sizes["layer_types"] = [kinds[layer % len(kinds)] for layer in range(4)]
    config = kind.config_class(**{**sizes, **_ALSO.get(name, {})})
    config.architectures = [name]
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = kind._from_config(config, attn_implementation="eager")
    randomize(model)
    return model.eval()

"""What TransformerLens overlooks in a config.json, or knows by a model's name only."""

from __future__ import annotations

import dataclasses
from typing import Any

from transformer_lens import HookedTransformerConfig


def overlooked(architecture: str, hf_config: Any) -> dict[str, Any]:
    """What some TransformerLens versions do not read from config.json, and take a default for.

    Raises:
        ValueError: if the checkpoint has what HookedTransformer has no place for.
    """
    for name in ("attention_bias", "mlp_bias"):
        if architecture == "LlamaForCausalLM" and getattr(hf_config, name, False):
            raise ValueError(
                f"{name}=True in config.json: TransformerLens drops the biases of a Llama, so the "
                "model would be wrong; it cannot be loaded as a HookedTransformer"
            )
    if architecture == "LlamaForCausalLM":
        return _rope(hf_config)
    if architecture == "GPTNeoXForCausalLM":
        parallel = {"parallel_attn_mlp": hf_config.use_parallel_residual}
        return _rope(hf_config) | parallel
    if architecture == "GPT2LMHeadModel":
        name = "scale_attn_by_inverse_layer_idx"
        return {name: getattr(hf_config, name, False)}
    return {}


def olmo_sizes(hf_config: Any) -> dict[str, Any]:
    """What config.json says of an OLMo or OLMo 2, in TransformerLens's words.

    Raises:
        ValueError: if it has grouped-query attention, which TransformerLens does not read.
    """
    if hf_config.num_key_value_heads not in (None, hf_config.num_attention_heads):
        raise ValueError(
            f"config.json has {hf_config.num_key_value_heads} key and value heads for "
            f"{hf_config.num_attention_heads} query heads, which TransformerLens does not read of "
            "an OLMo; it cannot be loaded as a HookedTransformer"
        )
    d_head = hf_config.hidden_size // hf_config.num_attention_heads
    return {
        "d_model": hf_config.hidden_size,
        "d_head": d_head,
        "n_heads": hf_config.num_attention_heads,
        "d_mlp": hf_config.intermediate_size,
        "n_layers": hf_config.num_hidden_layers,
        "n_ctx": hf_config.max_position_embeddings,
        "eps": getattr(hf_config, "rms_norm_eps", 1e-5),  # OLMo's LayerNorm has it fixed
        "d_vocab": hf_config.vocab_size,
        "d_vocab_out": hf_config.vocab_size,
        "rotary_dim": d_head,
        "attn_scale": d_head**0.5,
        "attn_types": ["global"] * hf_config.num_hidden_layers,
        **_rope(hf_config),
    }


def gemma_sizes(hf_config: Any) -> dict[str, Any]:
    """What config.json says of a Gemma, in TransformerLens's words."""
    sizes = {
        "d_model": hf_config.hidden_size,
        "d_head": hf_config.head_dim,
        "n_heads": hf_config.num_attention_heads,
        "n_key_value_heads": hf_config.num_key_value_heads,
        "d_mlp": hf_config.intermediate_size,
        "n_layers": hf_config.num_hidden_layers,
        "n_ctx": min(hf_config.max_position_embeddings, 8192),
        "eps": hf_config.rms_norm_eps,
        "d_vocab": hf_config.vocab_size,
        "d_vocab_out": hf_config.vocab_size,
        "rotary_dim": hf_config.head_dim,
        "attn_scale": hf_config.head_dim**0.5,
        **_gemma_rope(hf_config),
    }
    if getattr(hf_config, "query_pre_attn_scalar", None) is not None:
        sizes["attn_scale"] = hf_config.query_pre_attn_scalar**0.5
    if getattr(hf_config, "final_logit_softcapping", None) is not None:
        sizes["output_logits_soft_cap"] = hf_config.final_logit_softcapping
    if getattr(hf_config, "attn_logit_softcapping", None) is not None:
        sizes["attn_scores_soft_cap"] = hf_config.attn_logit_softcapping
    if getattr(hf_config, "layer_types", None) is not None:
        sizes["window_size"] = hf_config.sliding_window
        sizes["attn_types"] = [
            "local" if kind == "sliding_attention" else "global" for kind in hf_config.layer_types
        ]
    return sizes


def _gemma_rope(hf_config: Any) -> dict[str, Any]:
    """The rotary bases of a Gemma; Gemma 3 has another one for its local attention."""
    # transformers 5 keeps them in rope_parameters, for Gemma 3 by kind of attention.
    rope = getattr(hf_config, "rope_parameters", None) or {}
    everywhere = rope.get("full_attention", rope) or getattr(hf_config, "rope_scaling", None) or {}
    local = rope.get("sliding_attention", {}).get("rope_theta")
    bases = {
        "rotary_base": everywhere.get("rope_theta") or getattr(hf_config, "rope_theta", None),
        "rotary_base_local": local or getattr(hf_config, "rope_local_base_freq", None),
    }
    known = {name: int(value) for name, value in bases.items() if value is not None}
    known["rotary_scaling_factor"] = everywhere.get("factor", 1.0)
    return {name: value for name, value in known.items() if name in _config_fields()}


def _rope(hf_config: Any) -> dict[str, Any]:
    """Rotary settings: TransformerLens takes its default base for names that it does not list."""
    # transformers 5 keeps both in rope_parameters, 4 has rope_theta and rope_scaling.
    rope = getattr(hf_config, "rope_parameters", None) or {}
    rope = {**(getattr(hf_config, "rope_scaling", None) or {}), **rope}
    theta = rope.get("rope_theta", getattr(hf_config, "rope_theta", None))
    theta = theta or getattr(hf_config, "rotary_emb_base", None)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ValueError(
            f"config.json scales its rotary embeddings by {kind!r}, which TransformerLens would "
            "ignore, so the model would be wrong; it cannot be loaded as a HookedTransformer"
        )
    settings: dict[str, Any] = {} if theta is None else {"rotary_base": theta}
    if kind == "llama3":
        settings |= {
            "use_NTK_by_parts_rope": True,
            "NTK_by_parts_low_freq_factor": rope["low_freq_factor"],
            "NTK_by_parts_high_freq_factor": rope["high_freq_factor"],
            "NTK_by_parts_factor": rope["factor"],
        }
        if "NTK_original_ctx_len" in _config_fields():
            settings["NTK_original_ctx_len"] = rope["original_max_position_embeddings"]
    return settings


def _config_fields() -> set[str]:
    return {field.name for field in dataclasses.fields(HookedTransformerConfig)}

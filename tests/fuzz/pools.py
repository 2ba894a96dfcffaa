"""What the arguments of operations may be, for each of TransformerLens's two classes of models."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any, NewType

import torch

IS_BRIDGE = int(version("transformer_lens").partition(".")[0]) >= 4

Block = NewType("Block", str)
Component = NewType("Component", str)
Module = NewType("Module", str)
Point = NewType("Point", str)
Weight = NewType("Weight", str)
Setting = NewType("Setting", tuple[str, Any])
Attribute = NewType("Attribute", tuple[str, Any])

BLOCKS = ("blocks.0", "blocks.1")
"""Those that operations name; a model may have a third."""


def _in_blocks(*paths: str) -> list[str]:
    return [block + path for block in BLOCKS for path in paths]


_HOOKED: dict[Any, Any] = {
    Component: ["", ".attn", ".attn", ".mlp", ".mlp", ".ln1", ".ln2"],
    Module: [
        *_in_blocks("", ".attn", ".mlp", ".ln1", ".ln2", ".attn.hook_q", ".attn.hook_z"),
        *_in_blocks(".hook_resid_pre", ".hook_resid_mid", ".mlp.hook_post", ".ln1.hook_scale"),
        *_in_blocks(".hook_resid_post", ".attn.hook_pattern"),
        *("embed", "ln_final", "unembed", "hook_embed"),
    ],
    Point: [
        *_in_blocks(".hook_resid_pre", ".hook_resid_mid", ".hook_resid_post", ".hook_attn_out"),
        *_in_blocks(".hook_mlp_out", ".mlp.hook_pre", ".mlp.hook_post", ".ln1.hook_scale"),
        *_in_blocks(".ln1.hook_normalized", ".ln2.hook_normalized", ".attn.hook_q"),
        *_in_blocks(".attn.hook_k", ".attn.hook_v", ".attn.hook_z", ".attn.hook_pattern"),
        *_in_blocks(".attn.hook_attn_scores", ".attn.hook_rot_q", ".attn.hook_result"),
        *_in_blocks(".hook_mlp_in", ".hook_q_input", ".hook_attn_in"),
        *("hook_embed", "ln_final.hook_scale"),
    ],
    Weight: [
        *("attn.W_Q", "attn.W_K", "attn._W_K", "attn.W_O", "attn.b_Q", "attn._b_V", "attn.b_O"),
        *("mlp.W_in", "mlp.W_out", "mlp.b_in", "mlp.b_out", "mlp.W_gate", "ln1.w", "ln1.b"),
    ],
    Setting: [
        ("attention_dir", "bidirectional"),
        ("attention_dir", "causal"),
        ("window_size", 2),
        ("window_size", 4),
        ("attn_scores_soft_cap", 3.0),
        ("clip_qkv", 0.5),
        ("eps", 0.1),
        ("rotary_adjacent_pairs", True),
        ("rotary_dim", 2),
        ("use_attn_result", True),
        ("use_split_qkv_input", True),
        ("use_attn_in", True),
        ("use_hook_mlp_in", True),
        ("parallel_attn_mlp", True),
        ("ungroup_grouped_query_attention", True),
        ("dtype", torch.bfloat16),
        ("positional_embedding_type", "standard"),
    ],
    Attribute: [
        ("attn._attention_dir_override", "bidirectional"),
        ("attn._attention_dir_override", "causal"),
        ("attn.attn_type", "local"),
        ("attn.attn_type", "global"),
        ("attn.attn_scale", 0.5),
        ("attn.alibi", None),
        ("ln1.eps", 0.1),
        ("mlp.act_fn", "tanh"),
    ],
}
_BRIDGE: dict[Any, Any] = {
    Module: [
        *_in_blocks("", ".attn", ".mlp", ".ln1", ".ln2", ".attn.q", ".attn.o", ".mlp.in"),
        *_in_blocks(".mlp.out", ".hook_in", ".hook_out", ".attn.hook_out", ".attn.hook_pattern"),
        *_in_blocks(".mlp.hook_out", ".ln1.hook_normalized", ".attn.q.hook_out"),
        *_in_blocks("._original_component", ".attn._original_component"),
        *_in_blocks(".mlp.out._original_component"),
        *("embed", "ln_final", "unembed", "embed.hook_out"),
    ],
    Point: [
        *_in_blocks(".hook_in", ".hook_out", ".attn.hook_out", ".attn.hook_pattern"),
        *_in_blocks(".attn.hook_attn_scores", ".attn.q.hook_out", ".attn.hook_z", ".attn.hook_in"),
        *_in_blocks(".ln1.hook_normalized", ".ln1.hook_scale", ".ln2.hook_in", ".mlp.hook_in"),
        *_in_blocks(".mlp.hook_out", ".mlp.out.hook_in", ".hook_resid_pre", ".hook_resid_mid"),
        *_in_blocks(".hook_resid_post", ".attn.hook_q", ".mlp.hook_post", ".hook_mlp_in"),
        *("embed.hook_out", "ln_final.hook_scale", "unembed.hook_out"),
    ],
    Weight: [
        *("attn.q.weight", "attn.o.weight", "mlp.in.weight", "mlp.out.weight", "ln1.weight"),
        *("attn.q._original_component.weight", "mlp.out._original_component.bias"),
        *("ln1._original_component.weight", "attn.W_Q", "mlp.W_out"),
    ],
    # Those for results or inputs of heads are left out: a Bridge adds these up, which is rounded
    # otherwise, and the package does so only in a block that has hooks.
    Setting: [("eps", 0.1), ("use_hook_mlp_in", True)],
    Attribute: [
        ("attn._original_component.scaling", 0.3),
        ("mlp._original_component.act_fn", "tanh"),
        ("ln1._original_component.variance_epsilon", 0.1),
        ("ln1._original_component.eps", 0.1),
    ],
}
BETWEEN = (
    ("embed.hook_out",)
    if IS_BRIDGE
    else ("hook_embed", "blocks.0.hook_resid_post", "blocks.1.hook_resid_post")
)
"""Hook points at which no block is half done."""
POOLS: dict[Any, Any] = {Block: BLOCKS, **(_BRIDGE if IS_BRIDGE else _HOOKED)}

# Configs of HookedTransformers, called after models that have such blocks. The package is not
# imported, because this module runs without it too.

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
if not version("transformer_lens").startswith("2."):
    VARIANTS |= {
        "olmo-2": {**LLAMA, "original_architecture": "Olmo2ForCausalLM"},
        "olmoe": {
            **LLAMA,
            "original_architecture": "OlmoeForCausalLM",
            "clip_qkv": 1.0,
            "num_experts": 3,
            "experts_per_token": 2,
        },
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

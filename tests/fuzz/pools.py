"""What the arguments of operations may be, for each of TransformerLens's two classes of models."""

from __future__ import annotations

import importlib
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
Method = NewType("Method", str)
OwnMethod = NewType("OwnMethod", str)
Instead = NewType("Instead", str)
Function = NewType("Function", str)

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
        ("attn.repeat_kv_heads", 1),
        ("ln1.eps", 0.1),
        ("mlp.act_fn", "tanh"),
    ],
    Method: [
        *("TransformerBlock.forward", "TransformerBlock.apply_mlp", "AbstractAttention.forward"),
        *("AbstractAttention.calculate_qkv_matrices", "Attention.calculate_z_scores"),
        *("AbstractAttention.calculate_attention_scores", "AbstractAttention.apply_rotary"),
        *("AbstractAttention.apply_causal_mask", "AbstractAttention.rotate_every_two"),
        *("AbstractAttention._make_causal_mask", "AbstractAttention.calculate_z_scores"),
        *("GroupedQueryAttention.calculate_qkv_matrices", "GroupedQueryAttention._apply_qk_norm"),
        *("GroupedQueryAttention.calculate_attention_scores", "Attention.forward"),
        *("MLP.forward", "GatedMLP.forward", "MoE.forward", "LayerNorm.forward", "MLP.__call__"),
        *("LayerNormPre.forward", "RMSNorm.forward", "RMSNormPre.forward", "HookPoint.forward"),
        *("HookPoint.__call__", "TransformerBlock.__call__", "Attention.__call__"),
        *("RMSNorm.__call__", "Embed.forward", "Unembed.forward", "Module.__call__"),
    ],
    OwnMethod: [
        *("apply_mlp", "attn.calculate_z_scores", "attn.calculate_attention_scores"),
        *("attn._make_causal_mask", "attn.apply_rotary", "attn.calculate_qkv_matrices"),
        *("attn.apply_causal_mask", "attn.rotate_every_two", "mlp.act_fn"),
    ],
    Instead: [
        *("MLP.forward", "GatedMLP.forward", "LayerNorm.forward", "LayerNormPre.forward"),
        *("RMSNorm.forward", "RMSNormPre.forward", "HookPoint.forward"),
        "AbstractAttention.rotate_every_two",
    ],
    Function: [
        "transformer_lens.components.abstract_attention:simple_attn_linear",
        "transformer_lens.components.abstract_attention:complex_attn_linear",
        "transformer_lens.components.abstract_attention:apply_softcap",
        "transformer_lens.components.abstract_attention:get_offset_position_ids",
        "transformer_lens.components.grouped_query_attention:simple_attn_linear",
        "transformer_lens.components.mlps.mlp:batch_addmm",
        "transformer_lens.utilities.addmm:batch_addmm",
        "transformer_lens.utilities.addmm:vanilla_addmm",
        "transformer_lens.components.transformer_block:repeat_along_head_dimension",
        "torch.nn.functional:softmax",
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
    Method: [
        *("BlockBridge.forward", "AttentionBridge.forward", "JointQKVAttentionBridge.forward"),
        *("PositionEmbeddingsAttentionBridge.forward", "MLPBridge.forward", "LinearBridge.forward"),
        *("GatedMLPBridge.forward", "NormalizationBridge.forward", "HookPoint.forward"),
        *("RMSNormalizationBridge.forward", "EmbeddingBridge.forward", "LinearBridge.__call__"),
        *("HookPoint.__call__", "LlamaAttention.forward", "LlamaDecoderLayer.forward"),
        *("LlamaMLP.forward", "LlamaRMSNorm.forward", "GPT2Attention.forward", "GPT2MLP.forward"),
        *("GPT2Block.forward", "Conv1D.forward", "Linear.forward"),
    ],
    OwnMethod: ["hook_out.forward", "attn.forward", "mlp.out.forward", "attn.q.forward"],
    Instead: ["HookPoint.forward", "Linear.forward", "Conv1D.forward", "LlamaRMSNorm.forward"],
    Function: [
        "transformers.models.llama.modeling_llama:eager_attention_forward",
        "transformers.models.llama.modeling_llama:apply_rotary_pos_emb",
        "transformers.models.gpt2.modeling_gpt2:eager_attention_forward",
        "torch.nn.functional:softmax",
    ],
}
BETWEEN = (
    ("embed.hook_out",)
    if IS_BRIDGE
    else ("hook_embed", "blocks.0.hook_resid_post", "blocks.1.hook_resid_post")
)
"""Hook points at which no block is half done."""
POOLS: dict[Any, Any] = {Block: BLOCKS, **(_BRIDGE if IS_BRIDGE else _HOOKED)}

_MODULES = [
    *("transformer_lens", "transformer_lens.components", "transformer_lens.hook_points"),
    *("torch.nn", "transformer_lens.model_bridge.generalized_components"),
    *("transformers.models.llama.modeling_llama", "transformers.models.gpt2.modeling_gpt2"),
    "transformers.pytorch_utils",
]


def find_class(*names: str) -> Any:
    """A class by whichever of its names the installed TransformerLens has."""
    for module in _MODULES:
        try:
            imported = importlib.import_module(module)
        except ModuleNotFoundError:
            continue
        for name in names:
            if name in vars(imported):
                return vars(imported)[name]
    raise AttributeError(f"there is no {names}")

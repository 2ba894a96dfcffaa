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

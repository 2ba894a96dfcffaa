"""Each kind of change that the random trial draws, by itself: between forwards, or within one."""

from __future__ import annotations

import itertools
import pickle
from typing import Any

import pytest
from block_variants import IS_2
from cases import Case, Installed, Outcome, difference, equal
from pools import IS_BRIDGE

NO_GRAD, GRAD = (("forward", 5, grad, 0, None) for grad in ("no_grad", "grad"))
GPT2, QWEN3, GPT_NEO = (("gpt2", 2, None), ("qwen3", 2, None), ("gpt-neo", 2, None))
BRIDGE, FOLDED, QWEN3_BRIDGE = ("llama", ""), ("llama", "compatible"), ("qwen3", "")
GPT2_BRIDGE = ("gpt2", "")


def torch_hooks(path: str) -> list[Any]:
    """Every kind of torch's hooks of a module, in turn."""
    kinds = ("forward", "forward always_call", "forward_pre", "forward_pre with_kwargs")
    return [
        operation
        for kind in (*kinds, "full_backward", "full_backward_pre")
        for operation in (
            ("torch_hook", path, kind, "read" if "backward" in kind else "scale"),
            *(GRAD, NO_GRAD, ("remove_hooks", "handles")),
        )
    ]


NO_HOOKS = [("replace_hook_dicts", "", f"_forward{kind}_hooks", "of all") for kind in ("", "_pre")]
"""The common idiom to remove all hooks."""

OF_TL, OF_LLAMA = "transformer_lens.components", "transformers.models.llama.modeling_llama"
SCALE = ("scale", "fwd", "name")
BIDIRECTIONAL = ("attention_dir", "bidirectional")
OTHER_FORMS = ("descriptor", "partialmethod", "partial", "mock", "autospec")

HOOKED_TRANSFORMER: dict[Any, list[Any]] = {
    QWEN3: [
        *(torch_hooks(f"blocks.1{path}") for path in ("", ".attn", ".mlp", ".ln1", ".attn.q_norm")),
        *(torch_hooks(f"blocks.1.{path}") for path in ("attn.hook_z", "hook_resid_post")),
        [*NO_HOOKS, ("hook", "blocks.0.hook_mlp_out", "zero", "fwd", "name")],
        [
            ("hook", "blocks.1.hook_resid_pre", "zero", "fwd", "name"),
            ("torch_hook", "blocks.1.hook_resid_pre", "forward", "read"),
        ],
        ("within", "hook_embed", ("hook", "blocks.0.attn.hook_rot_k", *SCALE)),
        ("within", "blocks.0.ln1.hook_normalized", ("hook", "blocks.0.mlp.hook_post", *SCALE)),
        [
            ("hook", "blocks.0.hook_mlp_out", *SCALE),
            ("hook", "blocks.1.hook_mlp_out", *SCALE),
            ("within", "blocks.1.attn.hook_z", ("remove_hooks", "reset")),
        ],
        *(
            ("exchange", f"blocks.0.{point}", "Doubling")
            for point in ("attn.hook_q", "attn.hook_pattern", "ln1.hook_scale", "hook_resid_mid")
        ),
        ("exchange", "blocks.0.mlp", "Sequential"),
        ("graft", "blocks.1", "blocks.0"),
        *(("sub_class", f"blocks.0{path}", "scale") for path in ("", ".attn", ".attn.hook_z")),
        [
            ("hook", "blocks.0.attn.hook_q", *SCALE),
            *(NO_GRAD, ("sub_class", "blocks.0.attn", "scale")),
        ],
        *(
            ("instance_forward", f"blocks.0.{path}", "put in")
            for path in ("attn", "attn.k_norm", "attn.hook_z", "mlp", "ln1", "hook_resid_mid")
        ),
        ("own_method", "blocks.0", "attn.calculate_qkv_matrices", None),
        ("own_method", "blocks.0", "attn.calculate_attention_scores", None),
        ("own_method", "blocks.0", "attn.calculate_z_scores", "layer_id"),
        ("own_method", "blocks.0", "apply_mlp", None),
        ("own_config", "blocks.1", ".attn", BIDIRECTIONAL),
        ("own_config", "blocks.1", ".attn", ("rotary_adjacent_pairs", True)),
        ("buffer", "blocks.1", "rotary_sin", "replaced"),
        ("within", "blocks.0.hook_resid_pre", ("exchange", "blocks.0.mlp.hook_post", "Doubling")),
        ("within", "blocks.0.hook_resid_pre", ("exchange", "blocks.1.attn.hook_z", "Doubling")),
        ("within", "blocks.0", ("exchange", "blocks.1.attn.hook_z", "Doubling")),
        ("within", "blocks.0.hook_resid_pre", ("own_config", "blocks.1", ".attn", BIDIRECTIONAL)),
        ("within", "blocks.0.hook_resid_pre", ("buffer", "blocks.1", "rotary_sin", "replaced")),
    ],
    GPT2: [
        *(("weight", "blocks.0", name, "parametrized") for name in ("attn.W_Q", "mlp.W_in")),
        *(("weight", "blocks.0", name, "tensor") for name in ("attn.W_O", "mlp.b_out", "ln1.w")),
        *(("method", "MLP.forward", form) for form in OTHER_FORMS),
        ("method", "Module.__call__", "descriptor"),
        *(
            ("method", name, "function")
            for name in (
                *("MLP.__call__", "Attention.calculate_z_scores", "LayerNorm.forward"),
                *("AbstractAttention.apply_causal_mask", "HookPoint.forward"),
            )
        ),
        ("code", "MLP.forward"),
        ("module_function", f"{OF_TL}.abstract_attention:simple_attn_linear"),
        ("module_function", f"{OF_TL}.mlps.mlp:batch_addmm"),
        *(
            ("within", point, change)
            for point in ("hook_embed", "blocks.0.hook_resid_post")
            for change in (
                ("set_config", ("use_attn_result", True)),
                ("method", "MLP.forward", "function"),
                ("global_hook", "forward"),
            )
        ),
    ],
    GPT_NEO: [
        ("own_config", "blocks.0", ".attn", ("window_size", 2)),
        ("set_attribute", "blocks.1", ("attn._attention_dir_override", "bidirectional")),
    ],
}
if IS_2:  # which keeps a mask in each block, and has no such functions
    HOOKED_TRANSFORMER[GPT_NEO] = []

OF_BRIDGE: dict[Any, list[Any]] = {
    BRIDGE: [
        *(torch_hooks(f"blocks.1{path}") for path in ("", ".attn", ".ln1", ".mlp.out")),
        ("exchange", "blocks.1.attn.o", "Identity"),
        ("exchange", "blocks.1.mlp.hook_out", "Doubling"),
        ("exchange", "blocks.1.mlp.out._original_component", "another model's"),
        ("graft", "blocks.1", "blocks.1"),
        ("sub_class", "blocks.1.mlp", "scale"),
        ("sub_class", "blocks.1.mlp.hook_out", "scale"),
        ("instance_forward", "blocks.1.mlp", "put in"),
        ("instance_forward", "blocks.1.hook_out", "put in"),
        ("instance_forward", "ln_final", "put in"),
        ("weight", "blocks.1", "attn.q.weight", "in place"),
        ("weight", "blocks.1", "mlp.out._original_component.weight", "new"),
        ("weight", "unembed", "_original_component.weight", "new"),
        ("set_attribute", "blocks.1", ("mlp._original_component.act_fn", "tanh")),
        ("set_mode", "bfloat16"),
        *(
            ("hook", point, *SCALE)
            for point in ("embed.hook_out", "ln_final.hook_normalized", "unembed.hook_in")
        ),
        *(
            ("method", f"{cls}.forward", "function")
            for cls in (
                *("GatedMLPBridge", "LinearBridge", "RMSNormalizationBridge", "HookPoint"),
                "PositionEmbeddingsAttentionBridge",
            )
        ),
        ("within", "blocks.0.hook_out", ("method", "GatedMLPBridge.forward", "function")),
        ("within", "blocks.0.hook_out", ("hook", "blocks.1.attn.hook_z", *SCALE)),
    ],
    FOLDED: [
        [*NO_HOOKS, ("hook", "blocks.0.hook_mlp_out", "zero", "fwd", "name")],
        ("sub_class", "blocks.1.mlp", "scale"),
        ("sub_class", "blocks.1.mlp.hook_out", "scale"),
        ("instance_forward", "blocks.1.hook_out", "put in"),
    ],
    GPT2_BRIDGE: [
        ("exchange", "blocks.1.mlp.hook_out", "Doubling"),
        ("instance_forward", "blocks.1.mlp", "put in"),
        ("weight", "blocks.1", "attn.q.weight", "in place"),
        ("set_attribute", "blocks.1", ("mlp._original_component.act", "tanh")),
    ],
    QWEN3_BRIDGE: [("module_function", f"{OF_LLAMA}:apply_rotary_pos_emb")],
}
NOT_CALLED_BY_BRIDGE: dict[Any, list[Any]] = {
    BRIDGE: [
        ("method", "LlamaAttention.forward", "function"),
        ("method", "LlamaAttention.forward", "partialmethod"),
        ("module_function", f"{OF_LLAMA}:eager_attention_forward"),
    ],
    FOLDED: [
        ("method", "LlamaAttention.forward", "partialmethod"),
        ("instance_forward", "blocks.1.mlp.out._original_component", "put in"),
    ],
}
"""What has no effect as installed, and so must have none."""


BEFORE_ANY_FORWARD: dict[Any, list[Any]] = {
    GPT2: [
        *(("method", "MLP.forward", form) for form in (*OTHER_FORMS, "torch's decorator")),
        ("module_function", f"{OF_TL}.abstract_attention:simple_attn_linear"),
        ("module_function", f"{OF_TL}.mlps.mlp:batch_addmm"),
    ]
}
if IS_BRIDGE:
    BEFORE_ANY_FORWARD = {
        model: [("method", "LlamaAttention.forward", "partialmethod")] for model in (BRIDGE, FOLDED)
    }


def cases(of: dict[Any, list[Any]]) -> Any:
    """A test for each change."""
    changes = [(model, [op] if type(op) is tuple else op) for model in of for op in of[model]]
    ids = [f"{model[0]} {' '.join(map(str, change[0]))}" for model, change in changes]
    return pytest.mark.parametrize(("model", "change"), changes, ids=ids)


def run(model: Any, operations: list[Any], installed: Installed) -> list[tuple[str, Any]]:
    """What a case shows, which is what it shows as installed."""
    case = Case(model, 1, operations)
    expected = installed.run(case)
    found = difference(case, expected)
    assert found is None, found
    outcome: Outcome = pickle.loads(expected)
    assert outcome.messages == []
    return outcome.seen


def has_effect(seen: list[tuple[str, Any]]) -> bool:
    """Whether more is seen than the same two forwards twice."""
    gradients = itertools.takewhile(lambda value: value[0].startswith("grad "), seen[2:])
    n_before = 2 + len(list(gradients))
    before, after = seen[:n_before], seen[n_before:]
    return len(after) != n_before or not all(
        equal(*pair, exact=True) for pair in zip(before, after)
    )


@cases(OF_BRIDGE if IS_BRIDGE else HOOKED_TRANSFORMER)
def test_a_change_acts_as_installed(model, change, installed):
    assert has_effect(run(model, [NO_GRAD, GRAD, *change, NO_GRAD, GRAD], installed))


@cases(BEFORE_ANY_FORWARD)
def test_a_change_before_any_forward_does(model, change, installed):
    run(model, [*change, NO_GRAD, GRAD], installed)


@pytest.mark.skipif(not IS_BRIDGE, reason="of a Bridge")
@cases(NOT_CALLED_BY_BRIDGE)
def test_what_has_no_effect_as_installed_has_none(model, change, installed):
    assert not has_effect(run(model, [NO_GRAD, GRAD, *change, NO_GRAD, GRAD], installed))

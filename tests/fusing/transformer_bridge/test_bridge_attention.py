"""A fused Bridge's blocks to which nobody listens build no pattern."""

import copy

import pytest
import torch
from attending import ShapesMade, assert_either_way, unfused, with_gradients
from comparison import assert_agrees
from hf_models import HF_CONFIGS, N_LAYERS, padded, save_checkpoint
from model_classes import TransformerBridge
from packaging.version import Version
from parameters import in_turn
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

import tl_devicefix
from tl_devicefix.monkeypatch.versions import installed as version

pytestmark = [
    pytest.mark.bridge,
    pytest.mark.fuses,
    pytest.mark.filterwarnings("ignore:.*does not support:UserWarning"),
]


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral"])
def test_kv_cache_continues_where_one_block_is_hooked(name, fused, tokens, fused_blocks):
    bridge = fused(name)
    options = {"max_new_tokens": 4, "do_sample": False, "stop_at_eos": False, "verbose": False}

    def run(bridge):
        hooks = [("blocks.1.attn.hook_z", lambda value, hook: value * 2)]
        with bridge.hooks(fwd_hooks=hooks):
            first, cache = bridge(tokens, return_type="logits_and_cache")
            second = bridge(tokens[:, :3], past_key_values=cache)
            return first, second, bridge(tokens[:, 3:4], past_key_values=cache)

    assert_agrees(run(bridge), unfused(bridge, run))
    text = unfused(bridge, lambda bridge: bridge.generate(tokens, **options))
    fused_blocks.clear()
    assert_agrees(bridge.generate(tokens, **options), text)
    assert len(fused_blocks) == 4 * N_LAYERS


LONG = torch.full((1, 29), 7)
"""As many tokens as no other size is."""


@pytest.mark.parametrize(
    ("name", "compatible"), in_turn(["llama", "gpt2", "pythia"], [False, True])
)
def test_no_tensor_of_query_by_key_size_is_built(name, compatible, fused):
    bridge, run = fused(name, folded=compatible), with_gradients(LONG)

    with ShapesMade() as made:
        run(bridge)
    with ShapesMade() as as_installed:
        unfused(bridge, run)

    assert not made.of_pairs(29)
    assert {(1, 1, 29, 29), (1, 4, 29, 29)} <= set(as_installed.of_pairs(29))
    with ShapesMade() as made, torch.no_grad():  # some hooks of transformers' are there by now
        _, cache = bridge.run_with_cache(LONG, names_filter=lambda name: "hook_resid_p" in name)
    assert len(cache) == 2 * N_LAYERS or not compatible
    assert not made.of_pairs(29)


def test_no_tensor_of_query_by_key_size_is_built_across_devices(load, machine):
    bridge = load("llama", n_devices=3)
    tl_devicefix.fuse_blocks(bridge)
    with ShapesMade() as made, torch.no_grad():
        bridge(LONG)
    assert not made.of_pairs(29)


def test_users_own_mask_function_is_called_and_stays(fused, tokens):
    bridge = fused("llama")
    original = ALL_MASK_ATTENTION_FUNCTIONS["eager"]

    def everything(**options):
        return torch.zeros_like(original(**options))

    ALL_MASK_ATTENTION_FUNCTIONS["eager"] = everything
    try:
        actual, expected = bridge(tokens), unfused(bridge, lambda bridge: bridge(tokens))
        assert ALL_MASK_ATTENTION_FUNCTIONS["eager"] is everything
    finally:
        del ALL_MASK_ATTENTION_FUNCTIONS["eager"]

    assert_agrees(actual, expected)
    assert not torch.allclose(actual, bridge(tokens))


@pytest.mark.parametrize(("name", "of_layer"), in_turn(["llama", "gpt2"], [False, True]))
def test_a_hook_on_a_block_may_edit_its_mask(name, of_layer, fused, tokens):
    bridge = fused(name)
    expected = bridge(tokens)

    def hide_a_token(block, args, kwargs):
        mask = next(value for value in (*args, *kwargs.values()) if getattr(value, "ndim", 0) == 4)
        mask[1, :, 1:, 0] = torch.finfo(mask.dtype).min

    block = bridge.blocks[1].original_component if of_layer else bridge.blocks[1]
    block.register_forward_pre_hook(hide_a_token, with_kwargs=True)

    hidden = assert_either_way(bridge, lambda bridge: bridge(tokens))
    assert not torch.allclose(hidden, expected)


def test_a_bridge_scales_scores_by_its_own_config(fused, tokens):
    bridge = fused("gpt2")
    expected = bridge(tokens)

    bridge.blocks[1].attn.original_component.scaling = 3.0
    assert_agrees(bridge(tokens), expected)
    bridge.cfg.scale_attn_by_inverse_layer_idx = True
    assert not torch.allclose(assert_either_way(bridge, lambda bridge: bridge(tokens)), expected)


@torch.no_grad()
def test_an_unfused_block_of_another_model_stays_causal(fused, load, tokens):
    bridge = fused("llama")
    bridge.blocks[1] = load("llama", device="cpu").blocks[1]
    assert_either_way(bridge, lambda bridge: bridge(tokens))


def test_fused_blocks_can_be_copied_after_a_forward(load, tokens):
    bridge = load("gpt2", device="cpu")
    bridge(tokens)
    tl_devicefix.fuse_blocks(bridge)
    for hooks in ([], [("blocks.1.attn.hook_z", lambda value, hook: value * 2)]):
        bridge.run_with_hooks(tokens, fwd_hooks=hooks)
        copy.deepcopy(bridge.blocks[1])


def test_a_hook_that_would_see_no_mask_is_refused_in_a_forward(fused, tokens):
    bridge = fused("llama")

    def register(value, hook):
        bridge.blocks[1].register_forward_pre_hook(lambda *_: None)

    refused = pytest.raises(RuntimeError, match=r"register it before the forward")
    with refused, bridge.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", register)]):
        bridge(tokens)
    assert_either_way(bridge, lambda bridge: bridge(tokens))


def test_values_of_more_heads_than_the_model_has_are_refused(fused, tokens):
    model = fused("llama")  # with grouped queries
    attention = model.blocks[1].attn
    attention.v._original_component = torch.nn.Identity()
    with pytest.raises(RuntimeError):
        model(tokens)
    why = "not fused: its v_proj (Identity) has no weight"
    assert tl_devicefix.report(model)["blocks.1"] == why


@pytest.mark.parametrize("name", "kv")
def test_keys_of_fewer_examples_are_refused(name, fused, tokens):
    bridge = fused("llama")  # transformers would read them as fewer heads
    with pytest.raises(RuntimeError, match="returned another shape"):
        bridge.run_with_hooks(
            tokens, fwd_hooks=[(f"blocks.1.attn.hook_{name}", lambda x, hook: x[:1])]
        )


def squash_output(block):
    output = block.attn.o
    output._original_component = torch.nn.Sequential(output.original_component, torch.nn.Tanh())


def parametrize_norm(block):
    norm = block.ln1.original_component
    parametrize.register_parametrization(norm, "weight", torch.nn.Tanh())


class Doubled(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def double_gate(block):  # a processed Bridge reads its weight, and does not call it
    doubled = copy.copy(block.mlp.gate.original_component)
    doubled.__class__ = Doubled
    block.mlp.gate._original_component = doubled


def activate_by(name):
    return lambda block: setattr(block.mlp.original_component, name, torch.nn.Tanh())


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "compatible", "change"),
    [
        *(("gpt2", False, squash_output), ("llama", False, squash_output)),
        *(("llama", False, parametrize_norm), ("llama", True, activate_by("act_fn"))),
        *(("llama", folded, double_gate) for folded in (True, False)),
        *(("phi-3", folded, activate_by("activation_fn")) for folded in (True, False)),
    ],
)
def test_a_changed_part_acts_as_in_an_unfused_bridge(name, compatible, change, fused, tokens):
    bridge = fused(name, folded=compatible)
    bridge(tokens)
    change(bridge.blocks[1])  # a Bridge takes some activations from its config, not from a layer
    assert_either_way(bridge, lambda it: it(tokens))


@pytest.mark.skipif(
    version() < Version("4.3"), reason="a Gemma 2 Bridge runs in float64 since TransformerLens 4.3"
)
def test_padding_in_float64_changes_no_row_of_a_token(fused, tokens):
    mask = padded(tokens, slice(2))
    bridge = fused("gemma-2", folded=True).to(torch.float64)
    assert_either_way(bridge, lambda bridge: bridge(tokens, attention_mask=mask)[mask.bool()])


@torch.no_grad()
@pytest.mark.parametrize("name", ["pythia", "bloom"])
def test_bridges_of_equal_width_split_heads_by_their_own_config(name, tokens, tokenizer, tmp_path):
    """How a fused projection was split depends on heads, which its weight's sizes do not tell."""
    for n_heads in (4, 2):
        config = HF_CONFIGS[name]()
        config.num_attention_heads = n_heads
        save_checkpoint(AutoModelForCausalLM.from_config(config), tokenizer, tmp_path)
        bridge = TransformerBridge.boot_transformers(str(tmp_path), device="cpu", fuse_blocks=True)
        assert_agrees(bridge(tokens), unfused(bridge, lambda model: model(tokens)))


def test_gradient_checkpointing_acts_on_a_fused_bridge(fused, tokens):
    bridge = fused("llama").train().requires_grad_()
    bridge(tokens)
    bridge.original_model.activation_checkpointing_enable({"use_reentrant": False})

    def n_kept(bridge):
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda _: None):
            bridge(tokens)
        return len(kept)

    assert n_kept(bridge) == unfused(bridge, n_kept)
    assert_either_way(bridge, with_gradients(tokens))


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_plain_tensor_in_place_of_a_norms_parameter_acts(name, load, tokens):
    bridge = load("gpt2", device="cpu")
    norm = bridge.ln_final.original_component
    value = getattr(norm, name).detach() + 0.5
    delattr(norm, name)
    setattr(norm, name, value)
    expected = bridge(tokens)
    tl_devicefix.fuse_blocks(bridge)
    torch.testing.assert_close(bridge(tokens), expected)


@torch.no_grad()
@pytest.mark.parametrize("name", ["opt", "llama"])
def test_a_block_that_a_hook_calls_by_hand_is_the_bridges(name, fused, tokens):
    """It makes the mask and the positions that transformers' own layer would be given."""

    def run(bridge):
        results = []

        def call(activation, hook):
            results.append(bridge.blocks[2](activation))

        bridge.run_with_hooks(tokens, fwd_hooks=[("blocks.1.hook_resid_post", call)])
        return results

    assert_either_way(fused(name), run)

"""Compatibility mode: what it folds, within the memory there is, and after errors."""

import contextlib

import pytest
import torch
import transformers
from comparison import assert_agrees, assert_same_tensors, on_cpu
from hf_models import D_VOCAB, GROUPED, balanced_map, make_hf_model, save_checkpoint
from model_classes import TransformerBridge
from parameters import in_turn
from racing import asynchronous

from tl_devicefix.monkeypatch.versions import has_hooked_transformer
from tl_devicefix.placement.devices import storage_of
from tl_devicefix.transformer_bridge import processing

pytestmark = pytest.mark.bridge


@pytest.mark.fails_unpatched
@pytest.mark.parametrize("name", ["gpt2", "gemma-2"])
def test_tied_weights_fold_with_a_final_norm_on_another_device(name, machine, load, on_one, tokens):
    """The unpatched release raises there, and what it leaves computes other logits."""
    bridge = load(name, device_map=balanced_map(name, machine.devices))
    home = machine.devices[0]
    before = bridge(tokens).log_softmax(-1)
    bridge.enable_compatibility_mode()
    assert_agrees(bridge(tokens), on_one(name, folded=True)(tokens), home)
    assert_agrees(bridge(tokens).log_softmax(-1), before, home)


@pytest.mark.skipif(
    has_hooked_transformer(), reason="TransformerLens 3 cannot fold an offloaded block of a Bridge"
)
def test_processed_weights_of_offloaded_blocks_are_pinned_too(load):
    with asynchronous(2):
        bridge = load("llama", device_map={"": 0, "blocks.2": "cpu"}, folded=True)
        assert all(parameter.is_pinned() for parameter in bridge.blocks[2].parameters())


def joint_weights(bridge, kind, layer):
    """A weight of block 0 or 1 that is a view of another, and that other one."""
    block = bridge.blocks[layer]
    part, joint = (block.attn.q, block.attn.qkv) if kind == "gpt2" else (block.mlp.gate, None)
    hf_mlp = block.original_component.mlp
    joint = hf_mlp.gate_up_proj if joint is None else joint
    unwrap = lambda module: getattr(module, "original_component", module).weight  # noqa: E731
    return unwrap(part), unwrap(joint)


@pytest.mark.bridge(in_3=True)  # there, the unembedding's bias is a parameter
@pytest.mark.parametrize(("kind", "where"), in_turn(["gpt2", "phi-3"], ["simulated", "pinned"]))
@torch.no_grad()
def test_joint_weights_stay_shared_with_offloaded_blocks(kind, where, load, tokens):
    one = load(kind, device="cpu")
    weights = one.blocks[1].parameters()
    sizes = {storage_of(weight): weight.untyped_storage().nbytes() for weight in weights}
    component = next(c for c in one.placement.components if c.name == "blocks.1")
    assert component.weights == sum(sizes.values())
    with asynchronous(2) if where == "pinned" else contextlib.nullcontext():
        bridge = load(kind, device_map={"": 0, "blocks.1": "cpu"})
        before = bridge.placement
        bridge.to(torch.float32)  # weighs it again
        assert bridge.placement.components == before.components
        for layer in (0, 1):
            part, joint = joint_weights(bridge, kind, layer)
            assert storage_of(part) == storage_of(joint)
            for model in (bridge, one):
                joint_weights(model, kind, layer)[1].mul_(2)
        assert_agrees(bridge(tokens), one(tokens), bridge.placement.home)


@torch.no_grad()
def test_a_hook_may_not_change_an_offloaded_joint_weight(load, tokens):
    bridge = load("gpt2", device_map={"": 0, "blocks.1": "cpu"})
    before = bridge(tokens)
    for n in (0, 1):

        def double(activation, hook, n=n):
            joint_weights(bridge, "gpt2", 1)[n].mul_(2)

        with pytest.raises(RuntimeError, match="or in a hook on an earlier block"):
            bridge.run_with_hooks(tokens, fwd_hooks=[("blocks.1.hook_in", double)])
    assert torch.equal(bridge(tokens), before)


def test_bridge_folded_half_way_is_refused(machine, load, tokens, monkeypatch):
    bridge, process_unit = load("gpt2", n_devices=4), processing._process_unit

    def fail(bridge, unit, *rest):
        if unit.name == "blocks.4":
            raise KeyboardInterrupt("stop here")
        process_unit(bridge, unit, *rest)

    monkeypatch.setattr(processing, "_process_unit", fail)
    with pytest.raises(KeyboardInterrupt, match="stop here"):
        bridge.enable_compatibility_mode()

    refused = r"only partly processed.*load the model again"
    for use, given in ((bridge, [tokens]), (bridge.enable_compatibility_mode, [])):
        with pytest.raises(RuntimeError, match=refused):
            use(*given)


def test_weights_held_by_others_are_not_changed_by_folding(machine, load):
    bridge = load("llama", n_devices=3)
    unembed = bridge.unembed.original_component.weight
    values = unembed.detach().clone()
    bridge.enable_compatibility_mode()
    assert unembed.device == machine.devices[0]
    assert (unembed == values).all()


def test_compatibility_mode_works_after_a_refused_step(machine, load, on_one):
    bridge = load("llama", n_devices=4)
    hooks = dict(bridge.hook_dict)
    names = [point.name for point in hooks.values()]
    with pytest.raises(ValueError, match="rotary"):
        bridge.enable_compatibility_mode(refactor_factored_attn_matrices=True)
    assert not bridge.compatibility_mode
    assert dict(bridge.hook_dict) == hooks
    assert [point.name for point in hooks.values()] == names

    bridge.enable_compatibility_mode()

    expected = on_one("llama", folded=True)
    assert_same_tensors(on_cpu(bridge.state_dict()), on_cpu(expected.state_dict()))


FALCON = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1}
FALCON |= {"mamba_d_state": 4, "mamba_chunk_size": 4, "head_dim": 4, "attention_bias": True}
GATED = {"layer_types": ["full_attention"] * 5, "attention_bias": True, "head_dim": 8}
UNFOLDED = {"fold_ln": False, "center_writing_weights": False}


@pytest.fixture
def boot_grouped(machine, tokenizer, tmp_path):
    """`boot_grouped("PhiConfig", head_dim=8)`: on the CPU, with grouped heads."""

    def boot(kind, **own):
        config = getattr(transformers, kind)(**GROUPED, **own)
        save_checkpoint(make_hf_model(config), tokenizer, tmp_path)
        return TransformerBridge.boot_transformers(str(tmp_path), device="cpu")

    return boot


@pytest.mark.fails_unpatched
@pytest.mark.parametrize(
    ("kind", "own", "options", "beside"),
    [
        ("PhiConfig", {}, {}, None),
        ("FalconH1Config", FALCON, UNFOLDED, None),
        (
            "GptOssConfig",
            {"head_dim": 8, "num_local_experts": 3, "num_experts_per_tok": 2},
            UNFOLDED,
            "sinks",
        ),
        ("LagunaConfig", {"head_dim": 8, "attention_bias": True}, UNFOLDED, "gate"),
        ("Qwen3NextConfig", GATED, UNFOLDED, "a gate in its query projection"),
    ],
)
def test_value_biases_are_folded_where_they_add_a_constant(
    kind, own, options, beside, boot_grouped, tokens, caplog
):
    bridge = boot_grouped(kind, **own)
    before = bridge(tokens).log_softmax(-1)

    bridge.enable_compatibility_mode(**options)

    assert_agrees(bridge(tokens).log_softmax(-1), before, tolerance=1e-5)
    assert any(block.attn.v.bias.any() for block in bridge.blocks) == (beside is not None)
    says = f"does not apply to attention with {beside}, where value biases"
    assert (says in caplog.text) == (beside is not None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_folding_takes_one_float32_block_beside_the_model(dtype, machine, tokenizer, tmp_path):
    sizes = {"vocab_size": D_VOCAB, "n_embd": 64, "n_layer": 8, "n_head": 4, "n_positions": 32}
    config = transformers.GPT2Config(**sizes)
    save_checkpoint(make_hf_model(config, dtype), tokenizer, tmp_path)
    bridge = TransformerBridge.boot_transformers(str(tmp_path), n_devices=4, dtype=dtype)
    indices = range(4)
    contents = [machine.memory_allocated(index) for index in indices]
    for index in indices:
        machine.reset_peak_memory_stats(index)

    bridge.enable_compatibility_mode()

    sizes = {component.name: component.weights for component in bridge.placement.components}
    in_float32 = sizes["blocks.0"] * 4 // dtype.itemsize
    for index in indices:
        kept = max(contents[index], machine.memory_allocated(index))
        assert machine.max_memory_allocated(index) - kept < 1.5 * in_float32

"""Every architecture has the same results fused, or says why its blocks are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from comparison import assert_agrees
from hf_models import D_VOCAB, randomize
from model_classes import TransformerBridge
from transformer_lens.factories.architecture_adapter_factory import SUPPORTED_ARCHITECTURES

import tl_devicefix
from tl_devicefix.monkeypatch.versions import has_hooked_transformer

pytestmark = [
    pytest.mark.bridge,
    pytest.mark.full("a hundred and fifty models; by default, tests of plain layers run six"),
    pytest.mark.skipif(
        has_hooked_transformer(),
        reason="blocks of a TransformerBridge are fused in TransformerLens 4 only",
    ),
    pytest.mark.filterwarnings("ignore"),
]
AS_INSTALLED = {
    ("BitNetForCausalLM", True): "leaves out a norm",
    **{
        (name, compatible): "has a mask of its own"
        for name in ("GPTNeoForCausalLM", "OpenAIGPTLMHeadModel")
        for compatible in (False, True)
    },
    ("FalconForCausalLM", False): "a forward of its own",
    ("FalconForCausalLM", True): "a forward of its own",
}
NOT_RUN = ("CodeGenForCausalLM",)
"""What TransformerLens does not run with transformers 5.24."""
NOT_COMPATIBLE = ("FalconH1ForCausalLM", "VaultGemmaForCausalLM")
"""What TransformerLens does not process in these sizes, or at all."""


# By the names that transformers' configs have for them.
_NAMES = {
    0: "bos_token_id decoder_start_token_id num_kv_shared_layers",
    1: (
        "n_group topk_group n_shared_experts moe_num_shared_experts eos_token_id "
        "num_hidden_groups first_k_dense_replace"
    ),
    2: (
        "encoder_layers decoder_layers num_decoder_layers num_key_value_heads num_kv_heads "
        "swa_num_key_value_heads num_experts_per_tok moe_topk moe_k pad_token_id mamba_expand"
    ),
    4: (
        "num_hidden_layers n_layer n_layers num_layers num_attention_heads n_head n_heads "
        "num_heads encoder_attention_heads decoder_attention_heads num_experts "
        "num_local_experts n_routed_experts linear_num_key_heads linear_num_value_heads "
        "mamba_n_heads rotary_dim sliding_window chunk_size mamba_chunk_size laurel_rank "
        "time_step_rank conv_kernel"
    ),
    8: (
        "qk_rope_head_dim qk_nope_head_dim v_head_dim head_dim ssm_state_size state_size "
        "mamba_d_state d_kv hidden_size_per_layer_input query_pre_attn_scalar attention_window"
    ),
    16: "q_lora_rank kv_lora_rank linear_key_head_dim linear_value_head_dim mamba_d_head",
    32: "hidden_size n_embd d_model dim word_embed_proj_dim embedding_size",
    D_VOCAB: "vocab_size vocab_size_per_layer_input",
    48: (
        "intermediate_size n_inner ffn_dim d_ff ffn_hidden_size moe_intermediate_size "
        "encoder_ffn_dim decoder_ffn_dim shared_expert_intermediate_size mlp_hidden_size"
    ),
    64: "max_position_embeddings n_positions n_ctx max_seq_len mamba_d_ssm",
}
_SIZES: dict[str, int] = {name: size for size, names in _NAMES.items() for name in names.split()}
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
        **dict.fromkeys(("n_mamba_heads", "num_key_value_heads", "adapter_rank"), 4),
        **dict.fromkeys(("mamba_headdim", "attention_head_dim"), 16),
        **dict.fromkeys(("mamba_ngroups", "num_mem_blocks"), 1),
        "attention_hidden_size": 64,
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
    sizes = {
        key: value
        for key, value in _SIZES.items()
        if key in fields.keys() - config.attribute_map.keys()
        if fields[key] is not None or "_token" in key
    }
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


@torch.no_grad()
@pytest.mark.parametrize("compatible", [False, True])
@pytest.mark.parametrize("name", names())
def test_architecture_gives_the_same_fused_or_says_why_not(name, compatible, tokenizer, tmp_path):
    if name in NOT_RUN or (compatible and name in NOT_COMPATIBLE):
        pytest.skip(f"TransformerLens itself cannot run or process a {name}")
    model, tokens = make(name), torch.tensor([[3, 4, 5, 6, 7, 8, 9, 10]] * 2)
    model.save_pretrained(tmp_path)
    model = type(model).from_pretrained(tmp_path, attn_implementation="eager")
    with tl_devicefix.disabled():
        bridge = TransformerBridge.boot_transformers(
            name, hf_model=model, tokenizer=tokenizer, device="cpu"
        )
    if compatible:
        bridge.enable_compatibility_mode(disable_warnings=True)
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0

    def run():
        # Rows of padding that see no token may differ.
        return bridge(tokens), bridge(tokens, attention_mask=mask)[mask.bool()]

    with tl_devicefix.disabled():
        expected = run()

    actual = run()
    assert_agrees(actual, expected, tolerance=1e-5)
    tl_devicefix.fuse_blocks(bridge)
    assert_agrees(run(), expected, tolerance=1e-4)

    ways = set(tl_devicefix.report(bridge).values())
    reason = AS_INSTALLED.get((name, compatible))
    if reason is None:
        assert all(way.startswith("fused") for way in ways), ways
    else:
        assert all(reason in way for way in ways), ways
    with tl_devicefix.simulate(2):
        spread = TransformerBridge.boot_transformers(
            str(tmp_path), tokenizer=tokenizer, n_devices=2
        )
        if compatible:
            spread.enable_compatibility_mode(disable_warnings=True)
        assert len(spread.placement.devices) == 2
        assert_agrees(spread(tokens).cpu(), expected[0], tolerance=1e-5)

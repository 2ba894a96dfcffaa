"""Every architecture has the same results fused, or says why its blocks are not."""

import pytest
import torch
import transformers
from comparison import assert_agrees
from hf_models import make_hf_model
from model_classes import TransformerBridge
from transformer_lens.factories.architecture_adapter_factory import SUPPORTED_ARCHITECTURES

import tl_devicefix
from tl_devicefix.twin import Twin

pytestmark = [
    pytest.mark.bridge,
    pytest.mark.full("a hundred and fifty models; by default, tests of plain layers run six"),
    pytest.mark.fuses,
    pytest.mark.filterwarnings("ignore"),
]
N_TOKENS = 16  # more than the window of a twin
AS_INSTALLED = {
    ("BitNetForCausalLM", True): "leaves out a BitNetRMSNorm",
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


_WITH_HEADS = {"head_dim": 8, "num_key_value_heads": 2}
_SETTINGS = {
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 2},
    "DeepseekV4ForCausalLM": {"n_routed_experts": 8, "head_dim": 128},
    "GPTBigCodeForCausalLM": {"multi_query": True},
    "HunYuanDenseV1ForCausalLM": _WITH_HEADS,
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"] * 16},
    "NemotronForCausalLM": _WITH_HEADS,
}
"""Settings without which a default config has no twin."""
_SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "vocab_size": 40}
_SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1}
_WITHOUT_TWIN = {
    "BambaForCausalLM": {**_MAMBA, "attn_layer_indices": [1, 3]},
    "FalconMambaForCausalLM": {},
    "Gemma4ForCausalLM": {
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 40, "sliding_window": 4,
    },
    "GraniteMoeHybridForCausalLM": {
        **_MAMBA, "layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 48,
        "num_local_experts": 4, "num_experts_per_tok": 2,
        "position_embedding_type": "rope",  # without, TransformerLens alone does not run it either
    },
    "HrmTextForCausalLM": {},
    "JambaForCausalLM": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4},
    "Mamba2ForCausalLM": {"num_heads": 4, "head_dim": 16, "n_groups": 1, "expand": 2},
    "MambaForCausalLM": {},
    "RecurrentGemmaForCausalLM": {},
    "RwkvForCausalLM": {"attention_hidden_size": 32},
    "Zamba2ForCausalLM": {
        "layers_block_type": ["mamba", "hybrid"] * 2, "hybrid_layer_ids": [1, 3],
        **dict.fromkeys(("n_mamba_heads", "num_key_value_heads", "adapter_rank"), 4),
        **dict.fromkeys(("mamba_headdim", "attention_head_dim"), 16),
        **dict.fromkeys(("mamba_ngroups", "num_mem_blocks"), 1), "attention_hidden_size": 64,
    },
}  # fmt: skip
_OF_TEXT = ("ForCausalLM", "LMHeadModel", "ForMaskedLM")


def names():
    """The architectures of text that transformers has a class for, by its name."""
    present = set(dir(transformers))  # `hasattr` would import each model's code
    return sorted(name for name in present & {*SUPPORTED_ARCHITECTURES} if name.endswith(_OF_TEXT))


def make(name):
    """A tiny model of an architecture."""
    kind = getattr(transformers, name)
    if name in _WITHOUT_TWIN:
        return make_hf_model(kind.config_class(**{**_SMALL, **_WITHOUT_TWIN[name]}))
    model = Twin.of(kind.config_class(**_SETTINGS.get(name, {})), N_TOKENS, kind).hf_model
    model.config.architectures = [name]
    return model


@torch.no_grad()
@pytest.mark.parametrize("compatible", [False, True])
@pytest.mark.parametrize("name", names())
def test_architecture_gives_the_same_fused_or_says_why_not(name, compatible, tokenizer, tmp_path):
    if name in NOT_RUN or (compatible and name in NOT_COMPATIBLE):
        pytest.skip(f"TransformerLens itself cannot run or process a {name}")
    model, tokens = make(name), torch.arange(3, 3 + N_TOKENS).repeat(2, 1)
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

"""A zoo of tiny Hugging Face models, one of each architecture: five layers, sixteen wide.

Their weights are random, and nothing is downloaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

N_LAYERS = 5  # not a multiple of 2, 3 or 4, so that no split is even
D_MODEL = 16
N_HEADS = 4
N_KEY_VALUE_HEADS = 2
D_MLP = 24
D_VOCAB = 40
N_CTX = 32

_TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
_ROTARY = {
    "hidden_size": D_MODEL,
    "intermediate_size": D_MLP,
    "num_hidden_layers": N_LAYERS,
    "num_attention_heads": N_HEADS,
    "vocab_size": D_VOCAB,
    "max_position_embeddings": N_CTX,
    **_TOKENS,
}
GROUPED = {**_ROTARY, "num_key_value_heads": N_KEY_VALUE_HEADS}
_GPT = {"n_embd": D_MODEL, "n_layer": N_LAYERS, "n_head": N_HEADS, "vocab_size": D_VOCAB}
_GPT |= {"n_positions": N_CTX, **_TOKENS}


def _phi() -> PretrainedConfig:
    config = transformers.PhiConfig(**_ROTARY, partial_rotary_factor=0.5)
    config.partial_rotary_factor = 0.5  # transformers 5 keeps it in rope_parameters
    return config


_RECURRENT = {"hidden_size": D_MODEL, "num_hidden_layers": N_LAYERS, "vocab_size": D_VOCAB}
_RECURRENT |= {"state_size": 4, "conv_kernel": 3, **_TOKENS}
_HEADS = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 4}


def _nemotron_h() -> PretrainedConfig:
    sizes = {name: value for name, value in GROUPED.items() if name != "num_hidden_layers"}
    return transformers.NemotronHConfig(
        **sizes, layers_block_type=["mamba", "attention", "mlp", "mamba", "moe"], head_dim=4,
        mamba_num_heads=4, mamba_head_dim=8, n_groups=1, ssm_state_size=4, chunk_size=4,
        n_routed_experts=3, num_experts_per_tok=2, moe_intermediate_size=8,
        moe_shared_expert_intermediate_size=8,
    )  # fmt: skip


_LINEAR_HEADS = {
    "layer_types": (["linear_attention", "full_attention"] * N_LAYERS)[:N_LAYERS],
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 8,
}


HF_CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "gpt2": lambda: transformers.GPT2Config(**_GPT, n_ctx=N_CTX),
    "llama": lambda: transformers.LlamaConfig(**GROUPED),
    "qwen2": lambda: transformers.Qwen2Config(**GROUPED),
    "pythia": lambda: transformers.GPTNeoXConfig(**_ROTARY, rotary_pct=0.5),
    "gemma-2": lambda: transformers.Gemma2Config(
        **GROUPED, head_dim=8, query_pre_attn_scalar=8, sliding_window=4
    ),
    "mixtral": lambda: transformers.MixtralConfig(
        **GROUPED, num_local_experts=3, num_experts_per_tok=2
    ),
    "bloom": lambda: transformers.BloomConfig(
        hidden_size=D_MODEL, n_layer=N_LAYERS, n_head=N_HEADS, vocab_size=D_VOCAB, **_TOKENS
    ),
    "falcon": lambda: transformers.FalconConfig(**_ROTARY),
    "opt": lambda: transformers.OPTConfig(**_ROTARY, ffn_dim=D_MLP, word_embed_proj_dim=D_MODEL),
    "phi": _phi,
    "gpt-neo": lambda: transformers.GPTNeoConfig(
        hidden_size=D_MODEL,
        num_layers=N_LAYERS,
        num_heads=N_HEADS,
        vocab_size=D_VOCAB,
        max_position_embeddings=N_CTX,
        attention_types=[[["global", "local"], 2], [["global"], 1]],
        window_size=4,
        **_TOKENS,
    ),
    "gpt-j": lambda: transformers.GPTJConfig(**_GPT, n_inner=4 * D_MODEL, rotary_dim=4),
    "mistral": lambda: transformers.MistralConfig(**GROUPED, sliding_window=4),
    "qwen3": lambda: transformers.Qwen3Config(**GROUPED, head_dim=8),
    "phi-3": lambda: transformers.Phi3Config(**_ROTARY),
    "gemma": lambda: transformers.GemmaConfig(**GROUPED, head_dim=8),
    "gemma-3": lambda: transformers.Gemma3TextConfig(
        **GROUPED, head_dim=8, query_pre_attn_scalar=8, sliding_window=4, sliding_window_pattern=2
    ),
    "olmo": lambda: transformers.OlmoConfig(**_ROTARY),
    "olmo-2": lambda: transformers.Olmo2Config(**_ROTARY, rope_theta=500000.0, rms_norm_eps=1e-6),
    "olmoe": lambda: transformers.OlmoeConfig(**_ROTARY, num_experts=3, num_experts_per_tok=2),
    # Without qk_norm, TransformerLens until 3.7 drops norms that transformers has.
    "apertus": lambda: transformers.ApertusConfig(**GROUPED, qk_norm=True),
    "gpt-oss": lambda: transformers.GptOssConfig(
        **GROUPED, head_dim=8, num_local_experts=3, num_experts_per_tok=2, sliding_window=4
    ),
    "mamba": lambda: transformers.MambaConfig(**_RECURRENT, time_step_rank=2),
    "falcon-mamba": lambda: transformers.FalconMambaConfig(**_RECURRENT, time_step_rank=2),
    "mamba-2": lambda: transformers.Mamba2Config(
        **_RECURRENT, num_heads=4, head_dim=8, n_groups=2, chunk_size=4
    ),
    "bamba": lambda: transformers.BambaConfig(
        **GROUPED, **_HEADS, attn_layer_indices=[1, 3], mamba_chunk_size=4
    ),
    "nemotron-h": _nemotron_h,
    "olmo-hybrid": lambda: transformers.OlmoHybridConfig(**GROUPED, **_LINEAR_HEADS),
    "qwen3-next": lambda: transformers.Qwen3NextConfig(
        **GROUPED, **_LINEAR_HEADS, head_dim=8, mlp_only_layers=list(range(N_LAYERS))
    ),
    # Sizes for bitsandbytes, whose CPU kernel takes multiples of 64. Mistral has Linear layers,
    # GPT-2 has Conv1D layers, whose weights are transposed.
    "wide mistral": lambda: transformers.MistralConfig(
        **{**GROUPED, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3},
        sliding_window=4,
    ),
    "wide gpt2": lambda: transformers.GPT2Config(
        **{**_GPT, "n_embd": 64, "n_layer": 3}, n_ctx=N_CTX
    ),
}
"""Name of an architecture -> the config of a tiny model of it."""


def make_hf_model(config: PretrainedConfig, *dtypes: torch.dtype) -> PreTrainedModel:
    """A tiny model in which every norm and every bias matters, converted to each dtype in turn."""
    with torch.device("cpu"):  # the first test that needs it may have set another default
        model = AutoModelForCausalLM.from_config(config)
        randomize(model)
    model.config.architectures = [type(model).__name__]
    for dtype in dtypes:
        model = model.to(dtype)
    return model.eval()


@torch.no_grad()
def randomize(model: torch.nn.Module, seed: int = 0) -> None:
    """Give every parameter random values: vectors of order one, matrices that keep the scale.

    Norm weights and biases become non-trivial, and no matrix has a mean of zero, so that a
    folding or centring step that is left out shows in the results.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1:
            values = (values + 0.3) / D_MODEL**0.5
        elif name.endswith(("weight", ".w")):
            values = 1 + 0.3 * values
        else:
            values = 0.3 * values
        parameter.copy_(values)


def padded(tokens: torch.Tensor, where: slice = slice(3)) -> torch.Tensor:
    """An attention mask with pads in the first sequence: by default three on the left."""
    mask = torch.ones_like(tokens)
    mask[0, where] = 0
    return mask


def make_tokenizer(directory: Path) -> Any:
    """A tokenizer of the words w3, w4, ..., saved in a directory and read from it again.

    TransformerLens loads a tokenizer again from its directory, so it needs one.
    """
    words = ["<bos>", "<eos>", "<pad>", *(f"w{i}" for i in range(3, D_VOCAB - 1)), "<unk>"]
    model = tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
    ).save_pretrained(directory)
    return transformers.AutoTokenizer.from_pretrained(directory)


def save_checkpoint(hf_model: PreTrainedModel, tokenizer: Any, directory: Path) -> Path:
    """Save a model and its tokenizer as a Hugging Face checkpoint."""
    hf_model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def change_json(file: Path, **changes: object) -> None:
    """Change fields of a config.json."""
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


_FIRST_BLOCKS_LAST = {
    "llama": (("model.embed_tokens", "model.rotary_emb", "lm_head"), "model.layers", "model.norm"),
    "gpt2": (
        ("transformer.wte", "transformer.wpe", "transformer.drop", "lm_head"),
        "transformer.h",
        "transformer.ln_f",
    ),
}


def balanced_map(name: str, devices: list[Any]) -> dict[str, str]:
    """Return a `device_map` like accelerate's "balanced", with the final norm on the last device.

    The package's own plan puts the norm elsewhere.
    """
    first, blocks, last = _FIRST_BLOCKS_LAST.get(name, _FIRST_BLOCKS_LAST["llama"])
    device_map = dict.fromkeys(first, str(devices[0]))
    for layer in range(N_LAYERS):
        device_map[f"{blocks}.{layer}"] = str(devices[layer * len(devices) // N_LAYERS])
    return {**device_map, last: str(devices[-1])}

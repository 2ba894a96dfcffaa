"""A zoo of tiny models, one of each architecture: five layers, sixteen wide, with random weights.

Nothing is downloaded. A model exists in three forms that hold the same weights: a Hugging Face
model, a checkpoint directory that transformers saved, and, for `hf_model=`, an official name under
which TransformerLens finds the tiny config (see `configs_without_hub`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import tokenizers
import torch
import transformer_lens.loading_from_pretrained as tl_loading
import transformers
from transformer_lens import HookedTransformer, HookedTransformerConfig
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

N_LAYERS = 5  # not a multiple of 2, 3 or 4, so that no spread is even
D_MODEL = 16
N_HEADS = 4
N_KEY_VALUE_HEADS = 2
D_MLP = 24
D_VOCAB = 40
N_CTX = 32

NO_PROCESSING = {
    "fold_ln": False,
    "center_writing_weights": False,
    "center_unembed": False,
    "fold_value_biases": False,
}
"""What turns off all of `from_pretrained`'s processing."""


@dataclass(frozen=True)
class Architecture:
    """One kind of Hugging Face model that TransformerLens converts."""

    name: str
    official_name: str
    """A model of this architecture that TransformerLens knows by name."""
    hf_config: Callable[[], PretrainedConfig]
    sizes_by_name: dict[str, Any] = field(default_factory=dict)
    """Where TransformerLens takes the sizes from the name alone: the tiny model's sizes."""

    @property
    def can_refactor(self) -> bool:
        """Whether `refactor_factored_attn_matrices` applies: not with rotary embeddings."""
        return self.name in ("gpt2", "opt", "bloom")

    @property
    def is_moe(self) -> bool:
        """Whether the MLP is a mixture of experts."""
        return self.name == "mixtral"

    @property
    def has_rms_norms(self) -> bool:
        """Whether the norms are RMSNorms: they have no bias and leave the mean."""
        return self.name in ("llama", "qwen2", "gemma-2", "mixtral")


_ROTARY = {
    "hidden_size": D_MODEL,
    "intermediate_size": D_MLP,
    "num_hidden_layers": N_LAYERS,
    "num_attention_heads": N_HEADS,
    "vocab_size": D_VOCAB,
    "max_position_embeddings": N_CTX,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
_GROUPED = {**_ROTARY, "num_key_value_heads": N_KEY_VALUE_HEADS}
_TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


def _gpt2() -> PretrainedConfig:
    return transformers.GPT2Config(
        n_embd=D_MODEL, n_layer=N_LAYERS, n_head=N_HEADS, vocab_size=D_VOCAB, n_positions=N_CTX,
        n_ctx=N_CTX, **_TOKENS,
    )  # fmt: skip


def _opt() -> PretrainedConfig:
    return transformers.OPTConfig(
        hidden_size=D_MODEL, num_hidden_layers=N_LAYERS, num_attention_heads=N_HEADS, ffn_dim=D_MLP,
        vocab_size=D_VOCAB, max_position_embeddings=N_CTX, word_embed_proj_dim=D_MODEL, **_TOKENS,
    )  # fmt: skip


def _bloom() -> PretrainedConfig:
    return transformers.BloomConfig(
        hidden_size=D_MODEL, n_layer=N_LAYERS, n_head=N_HEADS, vocab_size=D_VOCAB, **_TOKENS
    )


def _phi() -> PretrainedConfig:
    config = transformers.PhiConfig(**_ROTARY, partial_rotary_factor=0.5)
    config.partial_rotary_factor = 0.5  # transformers 5 hides it where TransformerLens cannot see
    return config


def _pythia() -> PretrainedConfig:
    return transformers.GPTNeoXConfig(**_ROTARY, rotary_pct=0.5)


def _llama() -> PretrainedConfig:
    return transformers.LlamaConfig(**_GROUPED)


def _qwen2() -> PretrainedConfig:
    return transformers.Qwen2Config(**_GROUPED)


def _gemma2() -> PretrainedConfig:
    return transformers.Gemma2Config(
        **_GROUPED, head_dim=8, query_pre_attn_scalar=8, sliding_window=4
    )


def _mixtral() -> PretrainedConfig:
    return transformers.MixtralConfig(**_GROUPED, num_local_experts=3, num_experts_per_tok=2)


# What TransformerLens has written down for names of models, for the tiny ones.
_SIZES = {
    "d_model": D_MODEL,
    "d_head": D_MODEL // N_HEADS,
    "n_heads": N_HEADS,
    "d_mlp": D_MLP,
    "n_layers": N_LAYERS,
    "n_ctx": N_CTX,
    "d_vocab": D_VOCAB,
    "d_vocab_out": D_VOCAB,
    "rotary_dim": D_MODEL // N_HEADS,
    "attn_scale": (D_MODEL // N_HEADS) ** 0.5,
}
_GEMMA_SIZES = {
    **_SIZES,
    "d_head": 8,
    "n_key_value_heads": N_KEY_VALUE_HEADS,
    "rotary_dim": 8,
    "attn_scale": 8**0.5,
}
_LOCAL = {"window_size": 4, "attn_types": ["local", "global", "local", "global", "local"]}

ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        Architecture("gpt2", "gpt2", _gpt2),
        Architecture("llama", "01-ai/Yi-6B", _llama),  # the Llama whose sizes are in its config
        Architecture("qwen2", "Qwen/Qwen2-0.5B", _qwen2),
        Architecture("pythia", "EleutherAI/pythia-70m", _pythia),
        Architecture("gemma-2", "google/gemma-2-2b", _gemma2, {**_GEMMA_SIZES, **_LOCAL}),
        Architecture("mixtral", "mistralai/Mixtral-8x7B-v0.1", _mixtral),
        Architecture("bloom", "bigscience/bloom-560m", _bloom),
        Architecture("opt", "facebook/opt-125m", _opt),
        Architecture("phi", "microsoft/phi-1", _phi),
    )
}


def _gpt_neo() -> PretrainedConfig:
    return transformers.GPTNeoConfig(
        hidden_size=D_MODEL, num_layers=N_LAYERS, num_heads=N_HEADS, vocab_size=D_VOCAB,
        max_position_embeddings=N_CTX, attention_types=[[["global", "local"], 2], [["global"], 1]],
        window_size=4, **_TOKENS,
    )  # fmt: skip


def _gpt_j() -> PretrainedConfig:
    return transformers.GPTJConfig(
        n_embd=D_MODEL, n_layer=N_LAYERS, n_head=N_HEADS, vocab_size=D_VOCAB, n_positions=N_CTX,
        n_inner=4 * D_MODEL, rotary_dim=4, **_TOKENS,
    )  # fmt: skip


def _mistral() -> PretrainedConfig:
    return transformers.MistralConfig(**_GROUPED, sliding_window=4)


def _qwen3() -> PretrainedConfig:
    return transformers.Qwen3Config(**_GROUPED, head_dim=8)


def _phi3() -> PretrainedConfig:
    return transformers.Phi3Config(**_ROTARY)


def _gemma() -> PretrainedConfig:
    return transformers.GemmaConfig(**_GROUPED, head_dim=8)


def _gemma3() -> PretrainedConfig:
    kinds = {"local": "sliding_attention", "global": "full_attention"}
    return transformers.Gemma3TextConfig(
        **_GROUPED, head_dim=8, query_pre_attn_scalar=8, sliding_window=4,
        layer_types=[kinds[kind] for kind in _LOCAL["attn_types"]],
    )  # fmt: skip


def _olmo() -> PretrainedConfig:
    return transformers.OlmoConfig(**_ROTARY)


def _olmo2() -> PretrainedConfig:
    # With what TransformerLens has written down for the model that it lists.
    return transformers.Olmo2Config(**_ROTARY, rope_theta=500000.0, rms_norm_eps=1e-6)


def _olmoe() -> PretrainedConfig:
    return transformers.OlmoeConfig(**_ROTARY, num_experts=3, num_experts_per_tok=2)


def _apertus() -> PretrainedConfig:
    return transformers.ApertusConfig(**_GROUPED)


def _gpt_oss() -> PretrainedConfig:
    return transformers.GptOssConfig(
        **_GROUPED, head_dim=8, num_local_experts=3, num_experts_per_tok=2, sliding_window=4
    )


OTHER_ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        Architecture("gpt-neo", "EleutherAI/gpt-neo-125M", _gpt_neo),
        Architecture("gpt-j", "EleutherAI/gpt-j-6B", _gpt_j),
        Architecture("mistral", "mistralai/Mistral-7B-v0.1", _mistral),
        Architecture("qwen3", "Qwen/Qwen3-0.6B", _qwen3),
        Architecture("phi-3", "microsoft/Phi-3-mini-4k-instruct", _phi3),
        Architecture("gemma", "google/gemma-2b", _gemma, _GEMMA_SIZES),
        Architecture("gemma-3", "google/gemma-3-1b-pt", _gemma3, {**_GEMMA_SIZES, **_LOCAL}),
        Architecture("olmo", "allenai/OLMo-1B-hf", _olmo, _SIZES),
        Architecture("olmo-2", "allenai/OLMo-2-0425-1B", _olmo2, _SIZES),
        Architecture("olmoe", "allenai/OLMoE-1B-7B-0924", _olmoe),
        Architecture("apertus", "swiss-ai/Apertus-8B-2509", _apertus),
        Architecture("gpt-oss", "openai/gpt-oss-20b", _gpt_oss),
    )
}
"""The rest of what TransformerLens converts; not every version has them all."""

ALL_ARCHITECTURES = {**ARCHITECTURES, **OTHER_ARCHITECTURES}


def make_hf_model(architecture: Architecture, *dtypes: torch.dtype) -> PreTrainedModel:
    """A tiny model in which every norm and every bias matters, converted to each dtype in turn."""
    model = AutoModelForCausalLM.from_config(architecture.hf_config())
    model.config.architectures = [type(model).__name__]
    randomize(model)
    for dtype in dtypes:
        model = model.to(dtype)
    return model.eval()


@torch.no_grad()
def randomize(model: torch.nn.Module) -> None:
    """Give every parameter random values: vectors of order one, matrices that keep the scale.

    Norm weights and biases become non-trivial, and no matrix has a mean of zero, so that a
    folding or centring step that is left out shows in the results.
    """
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1:
            values = (values + 0.3) / D_MODEL**0.5
        elif name.endswith(("weight", ".w")):
            values = 1 + 0.3 * values
        else:
            values = 0.3 * values
        parameter.copy_(values)


def make_tokenizer(directory: Path) -> Any:
    """A tokenizer of the words w3, w4, ..., saved in a directory and read from it again.

    TransformerLens reads a tokenizer anew from where it came, so it must have come from somewhere.
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
    """Save a model and its tokenizer as Hugging Face checkpoints are."""
    hf_model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@contextlib.contextmanager
def configs_without_hub(architecture: Architecture) -> Iterator[None]:
    """Within it, the architecture's official name has the tiny model's config.

    Only what TransformerLens would fetch is replaced: `AutoConfig`, and the sizes that it has
    written down for names whose configs are not public.
    """
    fetch, configure = tl_loading.AutoConfig.from_pretrained, tl_loading.get_pretrained_model_config

    def fetched(name: Any, **kwargs: Any) -> Any:
        if str(name) != architecture.official_name:
            return fetch(name, **kwargs)
        config = architecture.hf_config()
        config.architectures = [_class_name(architecture)]
        return config

    def configured(name: str, *args: Any, **kwargs: Any) -> Any:
        cfg = configure(name, *args, **kwargs)
        asked = {"n_layers": kwargs.get("first_n_layers"), "n_ctx": kwargs.get("n_ctx")}
        asked = {size: value for size, value in asked.items() if value is not None}
        return type(cfg).from_dict({**cfg.to_dict(), **architecture.sizes_by_name, **asked})

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(tl_loading.AutoConfig, "from_pretrained", fetched))
        if architecture.sizes_by_name:
            replaced = mock.patch.object(tl_loading, "get_pretrained_model_config", configured)
            stack.enter_context(replaced)
        yield


def _class_name(architecture: Architecture) -> str:
    config_class = type(architecture.hf_config())
    return transformers.AutoModelForCausalLM._model_mapping[config_class].__name__


def load_hooked(
    architecture: Architecture, hf_model: PreTrainedModel, tokenizer: Any, **options: Any
) -> HookedTransformer:
    """`HookedTransformer.from_pretrained` of the official name, with the tiny model's weights."""
    with configs_without_hub(architecture):
        return HookedTransformer.from_pretrained(
            architecture.official_name, hf_model=hf_model, tokenizer=tokenizer, **options
        )


def attention_only_config(**overrides: Any) -> HookedTransformerConfig:
    """A model of attention layers alone, as in "A Mathematical Framework"."""
    return _toy_config(attn_only=True, **overrides)


def solu_config(**overrides: Any) -> HookedTransformerConfig:
    """A model whose MLP has a norm within its activation."""
    return _toy_config(act_fn="solu_ln", d_mlp=D_MLP, **overrides)


def _toy_config(**options: Any) -> HookedTransformerConfig:
    sizes = {
        "n_layers": N_LAYERS,
        "d_model": D_MODEL,
        "n_heads": N_HEADS,
        "d_head": D_MODEL // N_HEADS,
        "d_vocab": D_VOCAB,
        "n_ctx": N_CTX,
        "normalization_type": "LN",
        "device": "cpu",
        "init_weights": False,
    }
    return HookedTransformerConfig(**{**sizes, **options})


TOYS = {"attention-only": attention_only_config, "solu": solu_config}
"""Models that are built from a HookedTransformerConfig and trained, not converted."""

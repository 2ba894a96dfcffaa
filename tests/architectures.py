"""The architectures that TransformerLens converts to a HookedTransformer, as tiny models.

A model exists in three forms that hold the same weights: a Hugging Face model, a checkpoint
directory that transformers saved, and, for `hf_model=`, an official name under which
TransformerLens finds the tiny config (see `configs_without_hub`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import transformer_lens.loading_from_pretrained as tl_loading
import transformers
from hf_models import (
    D_MLP,
    D_MODEL,
    D_VOCAB,
    HF_CONFIGS,
    N_CTX,
    N_HEADS,
    N_KEY_VALUE_HEADS,
    N_LAYERS,
    randomize,
)
from transformer_lens import HookedTransformer, HookedTransformerConfig
from transformers import PretrainedConfig, PreTrainedModel

NO_PROCESSING = {
    "fold_ln": False,
    "center_writing_weights": False,
    "center_unembed": False,
    "fold_value_biases": False,
}
"""What turns off all of `from_pretrained`'s processing."""
PROCESSING: dict[str, dict[str, bool]] = {
    "default": {},
    "none": NO_PROCESSING,
    **{f"without {flag}": {flag: False} for flag in NO_PROCESSING},
    "refactored": {"refactor_factored_attn_matrices": True},
}


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

_OFFICIAL_NAMES = {
    "gpt2": "gpt2",
    "llama": "01-ai/Yi-6B",  # the Llama whose sizes are in its config
    "qwen2": "Qwen/Qwen2-0.5B",
    "pythia": "EleutherAI/pythia-70m",
    "gemma-2": "google/gemma-2-2b",
    "mixtral": "mistralai/Mixtral-8x7B-v0.1",
    "bloom": "bigscience/bloom-560m",
    "opt": "facebook/opt-125m",
    "phi": "microsoft/phi-1",
}
_OTHER_NAMES = {
    "gpt-neo": "EleutherAI/gpt-neo-125M",
    "gpt-j": "EleutherAI/gpt-j-6B",
    "mistral": "mistralai/Mistral-7B-v0.1",
    "qwen3": "Qwen/Qwen3-0.6B",
    "phi-3": "microsoft/Phi-3-mini-4k-instruct",
    "gemma": "google/gemma-2b",
    "gemma-3": "google/gemma-3-1b-pt",
    "olmo": "allenai/OLMo-1B-hf",
    "olmo-2": "allenai/OLMo-2-0425-1B",
    "olmoe": "allenai/OLMoE-1B-7B-0924",
    "apertus": "swiss-ai/Apertus-8B-2509",
    "gpt-oss": "openai/gpt-oss-20b",
}
_SIZES_BY_NAME = {
    "gemma-2": {**_GEMMA_SIZES, **_LOCAL},
    "gemma-3": {**_GEMMA_SIZES, **_LOCAL},
    "gemma": {**_GEMMA_SIZES, "act_fn": "gelu_pytorch_tanh"},  # TransformerLens 3: the exact gelu
    "olmo": _SIZES,
    "olmo-2": _SIZES,
}


def _made(official_names: dict[str, str]) -> dict[str, Architecture]:
    return {
        name: Architecture(name, official, HF_CONFIGS[name], _SIZES_BY_NAME.get(name, {}))
        for name, official in official_names.items()
    }


ARCHITECTURES = _made(_OFFICIAL_NAMES)
OTHER_ARCHITECTURES = _made(_OTHER_NAMES)
"""The rest of what TransformerLens converts; not every version has them all."""

ALL_ARCHITECTURES = {**ARCHITECTURES, **OTHER_ARCHITECTURES}

_LIKE_ANOTHER = pytest.mark.full("its blocks are made as another's; parity's tests load it")
EVERY_ARCHITECTURE = [
    pytest.param(name, marks=() if name in ARCHITECTURES or name == "gpt-oss" else _LIKE_ANOTHER)
    for name in ALL_ARCHITECTURES
]
"""Of what does not depend on how an architecture is converted: some by default."""


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
    return toy_config(attn_only=True, **overrides)


def solu_config(**overrides: Any) -> HookedTransformerConfig:
    """A model whose MLP has a norm within its activation."""
    return toy_config(act_fn="solu_ln", d_mlp=D_MLP, **overrides)


def toy_config(**options: Any) -> HookedTransformerConfig:
    """A model of the sizes of the others, built from its config."""
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


def build_toy(
    cfg: HookedTransformerConfig, tokenizer: Any = None, device: str = "cpu", n_devices: int = 1
) -> HookedTransformer:
    """A model of a config over devices, always with the same values."""
    # As an argument of the config, TransformerLens would count CUDA devices.
    cfg.device, cfg.n_devices = device, n_devices
    model = HookedTransformer(cfg, tokenizer)
    randomize(model)
    return model


TOYS = {"attention-only": attention_only_config, "solu": solu_config}
"""Models that are built from a HookedTransformerConfig and trained, not converted."""

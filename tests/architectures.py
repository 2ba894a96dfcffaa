"""The architectures that TransformerLens converts to a HookedTransformer, as tiny models.

A model exists in three forms that hold the same weights: a Hugging Face model, a checkpoint
directory that transformers saved, and, for `hf_model=`, an official name under which
TransformerLens finds the tiny config (see `configs_without_hub`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

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
from model_classes import HookedTransformer
from transformer_lens import HookedTransformerConfig
from transformer_lens import loading_from_pretrained as tl_loading

NO_PROCESSING = {
    "fold_ln": False,
    "center_writing_weights": False,
    "center_unembed": False,
    "fold_value_biases": False,
}
"""Options that turn off all of `from_pretrained`'s processing."""
PROCESSING: dict[str, dict[str, bool]] = {
    "default": {},
    "none": NO_PROCESSING,
    **{f"without {flag}": {flag: False} for flag in NO_PROCESSING},
    "refactored": {"refactor_factored_attn_matrices": True},
}


_SIZES = {
    "n_layers": N_LAYERS, "d_model": D_MODEL, "n_heads": N_HEADS, "d_head": D_MODEL // N_HEADS,
    "d_mlp": D_MLP, "n_ctx": N_CTX, "d_vocab": D_VOCAB, "d_vocab_out": D_VOCAB,
    "rotary_dim": D_MODEL // N_HEADS, "attn_scale": (D_MODEL // N_HEADS) ** 0.5,
}  # fmt: skip
_GEMMA = {**_SIZES, "n_key_value_heads": N_KEY_VALUE_HEADS}
_GEMMA |= {"d_head": 8, "rotary_dim": 8, "attn_scale": 8**0.5}
_LOCAL = {"window_size": 4, "attn_types": ["local", "global", "local", "global", "local"]}
SIZES_BY_NAME: dict[str, dict[str, Any]] = {
    "gemma-2": {**_GEMMA, **_LOCAL},
    "gemma-3": {**_GEMMA, **_LOCAL},
    "gemma": {**_GEMMA, "act_fn": "gelu_pytorch_tanh"},  # TransformerLens 3 says the exact gelu
    "olmo": _SIZES,
    "olmo-2": _SIZES,
    "wide mistral": {"n_ctx": N_CTX},
    "wide gpt2": {"n_ctx": N_CTX},
}
"""The tiny models' sizes, where TransformerLens takes them from the name alone."""
OFFICIAL_NAMES = {
    "gpt2": "gpt2",
    "llama": "01-ai/Yi-6B",  # TransformerLens hard-codes other Llamas' sizes
    "qwen2": "Qwen/Qwen2-0.5B",
    "pythia": "EleutherAI/pythia-70m",
    "gemma-2": "google/gemma-2-2b",
    "mixtral": "mistralai/Mixtral-8x7B-v0.1",
    "bloom": "bigscience/bloom-560m",
    "opt": "facebook/opt-125m",
    "phi": "microsoft/phi-1",
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
    "wide mistral": "mistralai/Mistral-7B-v0.1",
    "wide gpt2": "gpt2",
}
"""Tiny model -> one of its architecture that TransformerLens knows; always the first nine."""


@contextlib.contextmanager
def configs_without_hub(name: str) -> Iterator[str]:
    """Within the context, the official name, which this gives, has the tiny model's config.

    It replaces only what TransformerLens fetches, `AutoConfig`, and the sizes that TransformerLens
    hard-codes for names whose configs are not public.
    """
    fetch, configure = tl_loading.AutoConfig.from_pretrained, tl_loading.get_pretrained_model_config

    def fetched(official_name: Any, **kwargs: Any) -> Any:
        if str(official_name) != OFFICIAL_NAMES[name]:
            return fetch(official_name, **kwargs)
        config = HF_CONFIGS[name]()
        model_class: Any = transformers.AutoModelForCausalLM._model_mapping[type(config)]
        config.architectures = [model_class.__name__]
        return config

    def configured(*args: Any, **kwargs: Any) -> Any:
        cfg = configure(*args, **kwargs)
        if name not in SIZES_BY_NAME:
            return cfg
        asked = {"n_layers": kwargs.get("first_n_layers"), "n_ctx": kwargs.get("n_ctx")}
        asked = {size: value for size, value in asked.items() if value is not None}
        return type(cfg).from_dict({**cfg.to_dict(), **SIZES_BY_NAME[name], **asked})

    with (
        mock.patch.object(tl_loading.AutoConfig, "from_pretrained", fetched),
        mock.patch.object(tl_loading, "get_pretrained_model_config", configured),
    ):
        yield OFFICIAL_NAMES[name]


def load_hooked(name: str, hf_model: Any, tokenizer: Any, **options: Any) -> HookedTransformer:
    """`HookedTransformer.from_pretrained` of the official name, with the tiny model's weights."""
    with configs_without_hub(name) as official_name:
        return HookedTransformer.from_pretrained(
            official_name, hf_model=hf_model, tokenizer=tokenizer, **options
        )


def toy_config(**options: Any) -> HookedTransformerConfig:
    """Return the config of a toy model, with the sizes of the others."""
    sizes = {name: _SIZES[name] for name in ("n_layers", "d_model", "n_heads", "d_head")}
    sizes |= {"d_vocab": D_VOCAB, "n_ctx": N_CTX, "normalization_type": "LN"}
    return HookedTransformerConfig(**{**sizes, "device": "cpu", "init_weights": False, **options})


TOYS = {
    "attention-only": partial(toy_config, attn_only=True),  # as in "A Mathematical Framework"
    "solu": partial(toy_config, act_fn="solu_ln", d_mlp=D_MLP),  # with a norm in its activation
}
"""Configs of models that are built and trained, not converted from Hugging Face models."""


def build_toy(
    cfg: HookedTransformerConfig, tokenizer: Any = None, device: str = "cpu", n_devices: int = 1
) -> HookedTransformer:
    """Build a config's model across devices, always with the same weights."""
    # Given to the config's constructor, n_devices would be compared with the CUDA devices.
    cfg.device, cfg.n_devices = device, n_devices
    model = HookedTransformer(cfg, tokenizer)
    randomize(model)
    return model

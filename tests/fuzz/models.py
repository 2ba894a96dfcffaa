"""The tiny models of the random trial: kinds, placements, and what in them can be drawn by name.

Nothing here imports the package, because the process that runs the installed TransformerLens alone
imports this too.
"""

from __future__ import annotations

import atexit
import functools
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any, NewType

import torch
from hf_models import HF_CONFIGS, make_tokenizer, randomize, save_checkpoint

VERSION = version("transformer_lens")
IS_BRIDGE = int(VERSION.partition(".")[0]) >= 4

Kind = tuple[str, ...]
"""A name of `KINDS`; and an extra option of a HookedTransformer, or how a Bridge is processed."""
Placement = dict[str, Any]
"""The options that spread a model, which `from_pretrained` and `boot_transformers` take."""
PLACEMENTS: list[Placement] = [
    *[{}] * 6,  # on one CPU
    *({"n_devices": n} for n in (2, 3, 4)),
    {"device_map": {"": 0, "blocks.1": "cpu"}},  # a block that is offloaded
    {"device_map": {"": 0, "blocks": "cpu", "blocks.0": 1}},
]

_ROTARY = {"positional_embedding_type": "rotary", "rotary_dim": 4}
_LLAMA = {"normalization_type": "RMS", "gated_mlp": True, "n_key_value_heads": 2, **_ROTARY}
_LOCAL = {"use_local_attn": True, "window_size": 3, "attn_types": ["local", "global", "local"]}
_MIXTURE = {"num_experts": 3, "experts_per_token": 2}
_PARALLEL = {**_ROTARY, "rotary_dim": 2, "parallel_attn_mlp": True, "act_fn": "gelu"}
HOOKED: dict[str, dict[str, Any]] = {
    "gpt2": {"act_fn": "gelu_new"},
    "gpt2 folded": {"act_fn": "gelu_new", "normalization_type": "LNPre"},
    "llama": _LLAMA,
    "llama folded": {**_LLAMA, "normalization_type": "RMSPre"},
    "qwen3": {**_LLAMA, "use_qk_norm": True},
    "gemma-2": {
        **_LLAMA,
        **_LOCAL,
        "use_normalization_before_and_after": True,
        "attn_scores_soft_cap": 5.0,
        "output_logits_soft_cap": 3.0,
    },
    "mistral": {**_LLAMA, **_LOCAL, "attn_types": ["local"] * 3},
    "mixtral": {**_LLAMA, **_MIXTURE},
    "pythia": _PARALLEL,
    "gpt-j": {**_PARALLEL, "rotary_adjacent_pairs": True},
    "bloom": {"positional_embedding_type": "alibi", "act_fn": "gelu_fast"},
    "gpt-neo": {**_LOCAL, "use_attn_scale": False, "act_fn": "gelu_new"},
    "attention only": {"attn_only": True, "normalization_type": None},
    "shortformer": {"positional_embedding_type": "shortformer"},
    "bidirectional": {"attention_dir": "bidirectional", "act_fn": "relu"},
    "solu": {"act_fn": "solu_ln"},
    "olmo-2": {**_LLAMA, "original_architecture": "Olmo2ForCausalLM"},
    "olmoe": {**_LLAMA, **_MIXTURE, "original_architecture": "OlmoeForCausalLM", "clip_qkv": 1.0},
    "gpt-oss": {**_LLAMA, **_LOCAL, "use_attention_sinks": True},
}
"""Configs of HookedTransformers, called after models that have such blocks."""
_EXTRAS: dict[str, dict[str, Any]] = {
    flag: {flag: True}
    for flag in (
        *("use_attn_result", "use_split_qkv_input", "use_hook_mlp_in"),
        *("ungroup_grouped_query_attention", "scale_attn_by_inverse_layer_idx"),
    )
} | {"": {}, "bfloat16": {"dtype": torch.bfloat16}}
if IS_BRIDGE:
    KINDS = ["llama", "gpt2", "pythia", "gemma-2", "qwen3", "bloom", "gpt-j"]
    EXTRAS = ["", "", "unprocessed", "compatible"]
else:
    KINDS = [name for name in HOOKED if VERSION[0] > "2" or not name.startswith(("olmo", "gpt-o"))]
    EXTRAS = [*[""] * 18, *_EXTRAS]


def build(kind: Kind, placement: Placement, seed: int = 0) -> Any:
    """A model whose weights depend on the seed alone."""
    return (_build_bridge if IS_BRIDGE else _build_hooked)(*kind, placement, seed)


def _build_hooked(name: str, extra: str, placement: Placement, seed: int) -> Any:
    from architectures import toy_config
    from transformer_lens import HookedTransformer

    sizes = {"n_layers": 3, "d_mlp": 24, "act_fn": "silu", "window_size": 4}
    model = HookedTransformer(toy_config(**{**sizes, **HOOKED[name], **_EXTRAS[extra]}))
    randomize(model, seed)
    if placement:
        from tl_devicefix.hooked_transformer.components import component_sizes
        from tl_devicefix.hooked_transformer.moving import place
        from tl_devicefix.placement.deciding import decide

        place(model, decide(component_sizes(model.cfg), device="sim:0", **placement))
    return model


def _build_bridge(name: str, processing: str, placement: Placement, seed: int) -> Any:
    from transformer_lens.model_bridge import TransformerBridge

    options = placement or {"device": "cpu"}
    bridge = TransformerBridge.boot_transformers(str(_checkpoint(name, seed)), **options)
    if processing:
        bridge.enable_compatibility_mode(no_processing=processing == "unprocessed")
    # Because TransformerLens registers hooks of its own in a block's first forward.
    bridge(torch.tensor([[3]]))
    return bridge


@functools.cache
def _checkpoint(name: str, seed: int) -> Path:
    """A directory with a model, which goes when the process ends."""
    from transformers import AutoModelForCausalLM

    directory = tempfile.TemporaryDirectory()
    atexit.register(directory.cleanup)
    model = AutoModelForCausalLM.from_config(HF_CONFIGS[name]())
    randomize(model, seed)
    return save_checkpoint(model, make_tokenizer(Path(directory.name)), Path(directory.name))


# What operations name. Each draws from what the model has.

Module = NewType("Module", str)
Point = NewType("Point", str)
Tensor = NewType("Tensor", str)
"""A parameter or a buffer."""


@functools.cache
def names_in(kind: Kind) -> dict[Any, list[str]]:
    """What can be drawn of a model by its name: in its first two blocks, and outside of blocks."""
    model = build(kind, {})
    outside = [name for name in ("embed", "ln_final", "unembed") if hasattr(model, name)]
    modules = {name: model.get_submodule(name) for name in outside}
    for block in ("blocks.0", "blocks.1"):
        modules |= dict(model.get_submodule(block).named_modules(prefix=block))
    # Of what a Bridge wraps only the whole, because its parts have wrappers of their own.
    modules = {name: of for name, of in modules.items() if "_original_component." not in name}
    return {
        Module: list(modules),
        Point: [name for name in model.hook_dict if name[:8] in ("blocks.0", "blocks.1", EMBED)],
        Tensor: [
            f"{name}.{own}"
            for name, module in modules.items()
            for own, value in (*module._parameters.items(), *module._buffers.items())
            if value is not None and name.startswith("blocks")
        ],
    }


EMBED = "embed.ho" if IS_BRIDGE else "hook_emb"
"""The beginning of the name of the embedding's hook point."""

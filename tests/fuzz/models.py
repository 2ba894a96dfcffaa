"""The tiny models of the fuzz test: kinds, placements, and the names that a case can draw.

Importing this module does not import the package, because the process that runs TransformerLens
unpatched imports it too.
"""

from __future__ import annotations

import atexit
import functools
import operator
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any, NewType

import torch
from hf_models import HF_CONFIGS, make_tokenizer, randomize, save_checkpoint

VERSION = version("transformer_lens")
IS_BRIDGE = int(VERSION.partition(".")[0]) >= 4
BLOCKS = "blocks.0", "blocks.1"
EMBED = "embed.hook_out" if IS_BRIDGE else "hook_embed"

Module = NewType("Module", str)
Point = NewType("Point", str)
Tensor = NewType("Tensor", str)  # a parameter or a buffer

PLACEMENTS: list[dict[str, Any]] = [
    *[{}] * 6,  # on one CPU
    *({"n_devices": n} for n in (2, 3, 4)),
    {"device_map": {"": 0, "blocks.1": "cpu"}},  # a block that is offloaded
    {"device_map": {"": 0, "blocks": "cpu", "blocks.0": 1}},
]

_ROTARY = {"positional_embedding_type": "rotary", "rotary_dim": 4}
_LLAMA = {"normalization_type": "RMS", "gated_mlp": True, "n_key_value_heads": 2, **_ROTARY}
_LOCAL = {"use_local_attn": True, "window_size": 3, "attn_types": ["local", "global", "local"]}
_SOFT_CAPS = {"attn_scores_soft_cap": 5.0, "output_logits_soft_cap": 3.0}
_MIXTURE = {"num_experts": 3, "experts_per_token": 2}
_PARALLEL = {**_ROTARY, "rotary_dim": 2, "parallel_attn_mlp": True, "act_fn": "gelu"}
HOOKED: dict[str, dict[str, Any]] = {
    "gpt2": {"act_fn": "gelu_new", "scale_attn_by_inverse_layer_idx": True},
    "llama": _LLAMA,
    "llama in bfloat16": {**_LLAMA, "dtype": torch.bfloat16},
    "llama folded": {**_LLAMA, "normalization_type": "RMSPre"},
    "qwen3": {**_LLAMA, "use_qk_norm": True},
    "gemma-2": {**_LLAMA, **_LOCAL, **_SOFT_CAPS, "use_normalization_before_and_after": True},
    "mixtral": {**_LLAMA, **_MIXTURE},
    "pythia": _PARALLEL,
    "gpt-j": {**_PARALLEL, "rotary_adjacent_pairs": True},
    "bloom": {"positional_embedding_type": "alibi", "act_fn": "gelu_fast"},
    "gpt-neo": {**_LOCAL, "use_attn_scale": False, "normalization_type": "LNPre"},
    "attention only": {"attn_only": True, "normalization_type": None},
    "shortformer": {"positional_embedding_type": "shortformer"},
    "solu": {"act_fn": "solu_ln"},
    "olmo-2": {**_LLAMA, "original_architecture": "Olmo2ForCausalLM"},
    "olmoe": {**_LLAMA, **_MIXTURE, "original_architecture": "OlmoeForCausalLM", "clip_qkv": 1.0},
    "gpt-oss": {**_LLAMA, **_LOCAL, "use_attention_sinks": True},
}
"""Configs of HookedTransformers, named after models with such blocks."""
if IS_BRIDGE:
    _PROCESSED = ("", "", "unprocessed", "compatible")
    _NAMES = ("llama", "gpt2", "pythia", "gemma-2", "qwen3", "bloom", "gpt-j")
    KINDS = [f"{name} {how}" for name in _NAMES for how in _PROCESSED]
else:
    KINDS = [name for name in HOOKED if VERSION[0] > "2" or not name.startswith(("olmo", "gpt-o"))]


def _build_hooked(name: str, placement: dict[str, Any], seed: int = 0) -> Any:
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    sizes = {"n_layers": 3, "d_model": 16, "n_heads": 4, "d_head": 4, "d_mlp": 24, "window_size": 4}
    sizes |= {"d_vocab": 40, "n_ctx": 32}
    usual = {"act_fn": "silu", "normalization_type": "LN", "device": "cpu", "init_weights": False}
    model = HookedTransformer(HookedTransformerConfig(**{**sizes, **usual, **HOOKED[name]}))
    randomize(model, seed)
    if placement:
        from tl_devicefix.hooked_transformer.components import component_sizes
        from tl_devicefix.hooked_transformer.moving import place
        from tl_devicefix.placement.deciding import decide

        place(model, decide(component_sizes(model.cfg), device="sim:0", **placement))
    return model


def _build_bridge(kind: str, placement: dict[str, Any], seed: int = 0) -> Any:
    from transformer_lens.model_bridge import TransformerBridge

    name, processed = kind.split(" ")
    options = placement or {"device": "cpu"}
    bridge = TransformerBridge.boot_transformers(str(_checkpoint(name, seed)), **options)
    if processed:
        bridge.enable_compatibility_mode(no_processing=processed == "unprocessed")
    with torch.no_grad():  # blocks register hooks of their own in the first forward
        bridge(torch.tensor([[3]]))
    return bridge


@functools.cache
def _checkpoint(name: str, seed: int) -> Path:
    """Save a model in a directory that is deleted when the process ends; return the directory."""
    from transformers import AutoModelForCausalLM

    directory = tempfile.TemporaryDirectory()
    atexit.register(directory.cleanup)
    model = AutoModelForCausalLM.from_config(HF_CONFIGS[name]())
    randomize(model, seed)
    return save_checkpoint(model, make_tokenizer(Path(directory.name)), Path(directory.name))


build = _build_bridge if IS_BRIDGE else _build_hooked
"""Builds a kind of model, placed, with weights that depend on the seed alone."""


@functools.cache
def names_in(kind: str) -> dict[Any, list[str]]:
    """Return the names that operations can draw: in the first two blocks, and outside of blocks."""
    model = build(kind, {})
    points = [name for name in model.hook_dict if name.startswith((*BLOCKS, EMBED, "ln_final"))]
    owners = sorted({name.rpartition(".")[0] for name in points} - {""})
    wrapped = (f"{name}._original_component" for name in owners if IS_BRIDGE)
    modules = [*owners, *wrapped, "unembed"]
    tensors = [
        f"{name}.{own}"
        for name, module in ((name, operator.attrgetter(name)(model)) for name in modules)
        for own, value in (*module._parameters.items(), *module._buffers.items())
        if value is not None
    ]
    # Half of the draws are a block's own hook points, which users hook most.
    own = [name for name in points if name.count(".") == 2] or points
    often = [*points, *own * (len(points) // len(own))]
    return {Module: [*modules, *modules, *points], Point: often, Tensor: tensors}

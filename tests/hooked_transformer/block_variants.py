"""Tiny HookedTransformers with every variant of a block, and what a run of one shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from transformer_lens import HookedTransformer, HookedTransformerConfig

import tl_devicefix
from tl_devicefix.hooked_transformer.known_blocks import IS_2

N_LAYERS, N_CTX, D_VOCAB = 2, 24, 40
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ROTARY = {"positional_embedding_type": "rotary", "rotary_dim": 4}
_LLAMA = {"normalization_type": "RMS", "gated_mlp": True, **_ROTARY}
_GROUPED = {"n_key_value_heads": 2}

VARIANTS: dict[str, dict[str, Any]] = {
    "LN": {"act_fn": "gelu_new"},
    "LNPre": {"normalization_type": "LNPre", "act_fn": "gelu_new"},
    "no norm": {"normalization_type": None, "act_fn": "relu"},
    "RMS, grouped": {**_LLAMA, **_GROUPED},
    "RMSPre, grouped": {**_LLAMA, **_GROUPED, "normalization_type": "RMSPre"},
    "ungrouped": {**_LLAMA, **_GROUPED, "ungroup_grouped_query_attention": True},
    "partial rotary": {**_LLAMA, "rotary_dim": 2},
    "adjacent pairs": {**_LLAMA, "rotary_adjacent_pairs": True},
    "partial, adjacent": {"rotary_adjacent_pairs": True, **_ROTARY, "rotary_dim": 2},
    "parallel": {"parallel_attn_mlp": True, **_ROTARY, "rotary_dim": 2},
    "parallel with mlp_in": {"parallel_attn_mlp": True, "use_hook_mlp_in": True},
    "ALiBi": {"positional_embedding_type": "alibi"},
    "shortformer": {"positional_embedding_type": "shortformer"},
    "local": {"use_local_attn": True, "window_size": 3, "attn_types": ["global", "local"]},
    "local rotary": {
        **_LLAMA,
        **({} if IS_2 else {"rotary_base_local": 100}),
        "use_local_attn": True,
        "window_size": 3,
        "attn_types": ["local", "global"],
    },
    "soft cap, norms after": {
        **_LLAMA,
        "attn_scores_soft_cap": 5.0,
        "use_normalization_before_and_after": True,
    },
    "qk-norm": {**_LLAMA, "use_qk_norm": True},
    "qk-norm, grouped": {**_LLAMA, **_GROUPED, "use_qk_norm": True},
    "experts": {**_LLAMA, "num_experts": 3, "experts_per_token": 2},
    "attention only": {"attn_only": True},
    "bidirectional": {"attention_dir": "bidirectional"},
    "solu_ln": {"act_fn": "solu_ln"},
    "mlp_in": {"use_hook_mlp_in": True},
    "no scale": {"use_attn_scale": False},
    "scale by layer": {"scale_attn_by_inverse_layer_idx": True},
    "attn_result": {"use_attn_result": True},
    "attn_result, grouped": {**_LLAMA, **_GROUPED, "use_attn_result": True},
    "split inputs": {"use_split_qkv_input": True},
    "attn_in": {**_LLAMA, "use_attn_in": True},
}
if not IS_2:
    VARIANTS |= {
        "OLMo 2": {**_LLAMA, "original_architecture": "Olmo2ForCausalLM"},
        "OLMo 2, mlp_in": {
            **_LLAMA,
            "original_architecture": "Olmo2ForCausalLM",
            "use_hook_mlp_in": True,
        },
        "OLMoE": {**_LLAMA, **_GROUPED, "original_architecture": "OlmoeForCausalLM"},
        "clipped": {**_LLAMA, "clip_qkv": 0.5},
        "clipped and normalised": {
            **_LLAMA,
            "original_architecture": "OlmoeForCausalLM",
            "clip_qkv": 1.0,
        },
        "sinks": {**_LLAMA, **_GROUPED, "use_attention_sinks": True},
        "log-n": {**_ROTARY, "use_logn_attn": True, "train_seq_length": 3},
    }
BLOCKS_AS_INSTALLED = {"split inputs", "attn_in"}
ATTENTION_AS_INSTALLED = {"attn_result", "attn_result, grouped", "log-n"} | BLOCKS_AS_INSTALLED


def make(
    name: str, dtype: torch.dtype = torch.float32, n_layers: int = N_LAYERS
) -> HookedTransformer:
    """A model of a variant; how its weights lie in memory differs from block to block."""
    options = {
        "n_layers": n_layers,
        "d_model": 16,
        "n_heads": 4,
        "d_head": 4,
        "d_mlp": 24,
        "d_vocab": D_VOCAB,
        "n_ctx": N_CTX,
        "act_fn": "silu",
        "normalization_type": "LN",
        "seed": 0,
        "device": "cpu",
        "dtype": dtype,
    }
    model = HookedTransformer(HookedTransformerConfig(**{**options, **VARIANTS[name]}))
    model.to(dtype)  # a mixture of experts has a router in float32
    generator = torch.Generator().manual_seed(0)
    for path, parameter in model.named_parameters():
        lies = torch.randn(parameter.shape, generator=generator) * 0.5
        parameter.data.copy_(lies)
        if parameter.dim() > 1 and path.startswith("blocks.1."):  # as a checkpoint has it
            parameter.data = parameter.data.mT.contiguous().mT
    return model


shared = cache(make)
"""A model that several tests use: they leave it as it was."""


def points(model: Any) -> list[str]:
    """The names of the hook points of the blocks."""
    return [name for name in model.hook_dict if name.startswith("blocks.")]


def tokens(n: int, batch: int = 2) -> torch.Tensor:
    return torch.randint(0, D_VOCAB, (batch, n), generator=torch.Generator().manual_seed(n))


def padded(n: int, left: int = 0, right: int = 0) -> torch.Tensor:
    """A mask of two rows, of which the second is not padded."""
    mask = torch.ones(2, n, dtype=torch.long)
    mask[0, :left] = 0
    mask[0, n - right :] = 0
    return mask


Seen = Mapping[str, Any]


def gradients(model: Any) -> Seen:
    """What a backward pass has left, and leaves no more."""
    result = {f"grad {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return result


def assert_as_installed(run: Callable[[], Seen]) -> Seen:
    """A run gives what it gives unpatched, bit for bit, or fails with the same error.

    Returns:
        What it gave.
    """
    (actual,) = assert_all_as_installed({"": run}).values()
    return actual


def assert_all_as_installed(runs: Mapping[str, Callable[[], Seen]]) -> dict[str, Seen]:
    """Several runs do; they share one switch to the installed forwards, which takes its time."""
    with tl_devicefix.disabled():
        expected = {key: _outcome(run) for key, run in runs.items()}
    actual = {key: _outcome(run) for key, run in runs.items()}
    for key, expecteds in expected.items():
        assert list(actual[key]) == list(expecteds), key
        for name, value in expecteds.items():
            assert _equal(actual[key][name], value), f"{key} {name}: {actual[key][name]}, {value}"
    return actual


def _outcome(run: Callable[[], Seen]) -> Seen:
    try:
        return run()
    except (RuntimeError, ValueError) as error:  # as where a hook edits what the backward needs
        return {"error": f"{type(error).__name__}: {error}"}


def _equal(actual: Any, expected: Any) -> bool:
    if not isinstance(expected, torch.Tensor):
        return bool(actual == expected)
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return False
    return torch.equal(actual.isnan(), expected.isnan()) and torch.equal(
        actual.nan_to_num(), expected.nan_to_num()
    )


def run(
    model: Any,
    hooks: Any = (),
    *,
    n: int = 5,
    grad: bool = True,
    log: dict[str, Any] | None = None,
    **options: Any,
) -> Seen:
    """Logits, and with `grad` gradients, of a run with hooks, which fill `log`."""
    seen: dict[str, Any] = {} if log is None else log
    seen.clear()
    with torch.set_grad_enabled(grad), model.hooks(list(hooks)):
        logits = model(tokens(n), **options)
        if grad:
            logits.float().pow(2).sum().backward()
    return {"logits": logits.detach(), **seen, **(gradients(model) if grad else {})}


class Recorder:
    """Makes hooks that note what they are given, in the order they are called.

    Args:
        log: where they note it.
    """

    def __init__(self, log: dict[str, Any]) -> None:
        self.log = log

    def replace(self, value: torch.Tensor, hook: Any) -> torch.Tensor:
        self.log[f"{len(self.log)} {hook.name}"] = value.detach().clone()
        return value * 1.25 + 0.125

"""What is replaced for TransformerBridge, and what is only called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tl_devicefix.gathering.caches import CACHING
from tl_devicefix.gathering.gathering import GATHERED, gathers, single
from tl_devicefix.monkeypatch.patch import Patch
from tl_devicefix.transformer_bridge import (
    alignment,
    block,
    forward,
    gathering,
    loading,
    processing,
)


def _patch(
    name: str,
    replacement: Callable[..., Any] | None,
    takes: str,
    why: str,
    owner: str | None = "TransformerBridge",
    since: str = "3.9",
) -> Patch:
    return Patch(name, replacement, tuple(takes.split()), why, owner, since, "4")


_at_home = "cached activations are read at home"
_folds = "each component where it lies, in float32 or wider, rounded once"
_flags = "fold_ln center_writing_weights center_unembed fold_value_biases"
_stacks = "stack weights of any devices in one copy"
_called = "called to process one block"
_unheard = "transformers' own layer where nobody listens in a block"
_caches = "model corrupted_tokens clean_cache corrupted_cache patching_metric src_layer"

PATCHES = (
    *(
        _patch("forward", block.forward, "self", _unheard, owner, "4.0")
        for owner in ("BlockBridge", "BloomBlockBridge", "OpaqueBlockBridge", "AltUpBlockBridge")
    ),
    _patch(
        "__call__",
        block.call,
        "self",
        "what a wrapper stands for, where nobody listens to anything of it",
        "GeneralizedComponent",
        "4.0",
    ),
    _patch(
        "boot_transformers",
        loading.boot_transformers,
        "model_name device dtype hf_model device_map n_devices max_memory",
        "place by the plan: embed, final norm and unembed together; n_devices of any type",
    ),
    _patch("process_weights", processing.process_weights, f"self verbose {_flags}", _folds),
    _patch(
        "enable_compatibility_mode",
        processing.enable_compatibility_mode,
        f"self disable_warnings no_processing {_flags}",
        "what cannot be processed is refused before anything is changed",
    ),
    _patch("forward", forward.forward, "self input return_type", "what leaves it is at home"),
    *(
        _patch(
            name,
            forward.with_own_tokenizer,
            "self input",
            "runs in flight do not change what others read",
        )
        for name in ("generate", "generate_stream")
    ),
    *(
        _patch(name, forward.reading, "self input", "one run at a time")
        for name in ("to_tokens", "to_str_tokens")
    ),
    _patch("to", alignment.to, "self", "a dtype keeps the placement"),
    _patch(
        "run_with_cache",
        gathering.run_with_cache,
        "self input return_cache_object remove_batch_dim",
        _at_home,
    ),
    _patch(
        "_stack_block_params", gathering.stack_block_params, "self attr_path reshape_fn", _stacks
    ),
    _patch(
        "stack_params_for",
        gathering.stack_params_for,
        "self submodule attr_path reshape_fn",
        _stacks,
    ),
    _patch("get_params", gathering.get_params, "self", gathers),
    *(
        _patch(name, single(name), "", "read on the device of `gather_on`")
        for name in ("W_E", "W_U", "b_U")
    ),
    _patch("W_pos", single("W_pos"), "", gathers, since="4.0"),
    *(
        _patch(name, replacement, " ".join(takes), why, since="4.0" if name == "W_E_pos" else "3.9")
        for name, (replacement, takes, why) in GATHERED.items()
    ),
    *(
        _patch(name, replacement, " ".join(takes), why, since="4.0")
        for name, (replacement, takes, why) in CACHING.items()
    ),
    _patch(
        "get_act_patch_direct_path",
        gathering.get_act_patch_direct_path,
        _caches,
        "the source head's activations meet its weights on its own device",
        None,
    ),
    _patch(
        "cache_activation_and_gradient",
        gathering.cache_activation_and_gradient,
        "model tokens metric_fn names_filter",
        "cached activations and gradients are read at home",
        None,
    ),
    _patch(
        "_fold_layer",
        None,
        "state_dict cfg layer_idx fold_biases center_weights adapter gqa",
        _called,
        "ProcessWeights",
    ),
    *(
        _patch(name, None, "state_dict cfg adapter", _called, "ProcessWeights")
        for name in (
            *("center_writing_weights", "fold_value_biases"),
            "refactor_factored_attn_matrices",
        )
    ),
    _patch("_fold_layer_norms_into_batched_experts", None, "self", _called),
)

"""What is replaced for TransformerBridge, and what is only called."""

from __future__ import annotations

from tl_devicefix.gathering import gathering
from tl_devicefix.gathering.patches import CACHING, GATHERED, gathers
from tl_devicefix.monkeypatch.patch import Patch
from tl_devicefix.transformer_bridge import (
    analysis,
    block,
    caching,
    forward,
    loading,
    moving,
    processing,
)
from tl_devicefix.transformer_bridge import gathering as bridge_gathering

BRIDGE = {"owner": "TransformerBridge", "since": "3.9", "until": "4"}
IN_4 = {**BRIDGE, "since": "4.0"}
STEPS = {"owner": "ProcessWeights", "since": "3.9", "until": "4"}

folds = "each component where it lies, in float32 or wider, rounded once; all or nothing"
called = "called to process one block"
flags = ("fold_ln", "center_writing_weights", "center_unembed", "fold_value_biases")

PATCHES = (
    *(
        Patch(
            "forward",
            block.forward,
            ("self",),
            "transformers' own layer where nobody listens in a block",
            **{**IN_4, "owner": owner},
        )
        for owner in ("BlockBridge", "BloomBlockBridge", "OpaqueBlockBridge", "AltUpBlockBridge")
    ),
    Patch(
        "__call__",
        block.call,
        ("self",),
        "what a wrapper stands for, where nobody listens to anything of it",
        **{**IN_4, "owner": "GeneralizedComponent"},
    ),
    Patch(
        "boot_transformers",
        loading.boot_transformers,
        ("model_name", "device", "dtype", "hf_model", "device_map", "n_devices", "max_memory"),
        "place by the plan: embed, final norm and unembed together; n_devices of any type",
        **BRIDGE,
    ),
    Patch(
        "process_weights", processing.process_weights, ("self", "verbose", *flags), folds, **BRIDGE
    ),
    Patch(
        "enable_compatibility_mode",
        processing.enable_compatibility_mode,
        ("self", "disable_warnings", "no_processing", *flags),
        "if it fails, the Bridge is as it was",
        **BRIDGE,
    ),
    Patch(
        "forward",
        forward.forward,
        ("self", "input", "return_type"),
        "what leaves the model is at home",
        **BRIDGE,
    ),
    *(
        Patch(
            name,
            forward.with_own_tokenizer,
            ("self", "input"),
            "runs in flight do not change what others read",
            **BRIDGE,
        )
        for name in ("generate", "generate_stream")
    ),
    *(
        Patch(name, forward.reading, ("self", "input"), "one run at a time", **BRIDGE)
        for name in ("to_tokens", "to_str_tokens")
    ),
    Patch("to", moving.to, ("self",), "a dtype keeps the placement", **BRIDGE),
    Patch(
        "run_with_cache",
        caching.run_with_cache,
        ("self", "input", "return_cache_object", "remove_batch_dim"),
        "cached activations are read at home",
        **BRIDGE,
    ),
    Patch(
        "_stack_block_params",
        bridge_gathering.stack_block_params,
        ("self", "attr_path", "reshape_fn"),
        "stack weights of any devices in one copy",
        **BRIDGE,
    ),
    Patch(
        "stack_params_for",
        bridge_gathering.stack_params_for,
        ("self", "submodule", "attr_path", "reshape_fn"),
        "stack weights of any devices in one copy",
        **BRIDGE,
    ),
    Patch("get_params", bridge_gathering.get_params, ("self",), gathers, **BRIDGE),
    *(
        Patch(name, gathering.single(name), (), "read on the device of `gather_on`", **BRIDGE)
        for name in ("W_E", "W_U", "b_U")
    ),
    Patch("W_pos", gathering.single("W_pos"), (), gathers, **IN_4),
    *(
        Patch(name, replacement, takes, why, **(IN_4 if name == "W_E_pos" else BRIDGE))
        for name, (replacement, takes, why) in GATHERED.items()
    ),
    *(
        Patch(name, replacement, takes, why, **IN_4)
        for name, (replacement, takes, why) in CACHING.items()
    ),
    Patch(
        "get_act_patch_direct_path",
        analysis.get_act_patch_direct_path,
        ("model", "corrupted_tokens", "clean_cache", "corrupted_cache", "src_layer"),
        "the source head's activations meet its weights on its own device",
        owner=None,
        since="3.9",
        until="4",
    ),
    Patch(
        "cache_activation_and_gradient",
        analysis.cache_activation_and_gradient,
        ("model", "tokens", "metric_fn", "names_filter"),
        "cached activations and gradients are read at home",
        owner=None,
        since="3.9",
        until="4",
    ),
    Patch(
        "_fold_layer",
        None,
        ("state_dict", "cfg", "layer_idx", "fold_biases", "center_weights", "adapter", "gqa"),
        called,
        **STEPS,
    ),
    *(
        Patch(name, None, ("state_dict", "cfg", "adapter"), called, **STEPS)
        for name in (
            "center_writing_weights",
            "fold_value_biases",
            "refactor_factored_attn_matrices",
        )
    ),
    Patch("_fold_layer_norms_into_batched_experts", None, ("self",), called, **BRIDGE),
)

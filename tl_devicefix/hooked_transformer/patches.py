"""What is replaced for HookedTransformer."""

from __future__ import annotations

from tl_devicefix.dispatch import forward
from tl_devicefix.gathering import gathering
from tl_devicefix.gathering.caches import CACHING
from tl_devicefix.gathering.gathering import GATHERED
from tl_devicefix.hooked_transformer import (
    alignment,
    block,
    config,
    hook_points,
    loading,
    moving,
    processing,
    tokenizing,
)
from tl_devicefix.hooked_transformer import gathering as hooked_gathering
from tl_devicefix.monkeypatch.patch import Patch

loads = "one component at a time, to its planned device, folded in float32"
folds = "each component on its own device, in float32 or wider, rounded once"
state = ("self", "state_dict")
plain = "one function of the weights; hook points are called where somebody listens"

PATCHES = (
    Patch(
        "from_pretrained",
        loading.from_pretrained,
        ("cls", "model_name", "fold_ln", "hf_model", "device", "n_devices", "dtype"),
        f"load {loads}; device_map and max_memory",
    ),
    Patch("load_and_process_state_dict", processing.load_and_process_state_dict, state, folds),
    Patch("process_weights_", processing.process_weights_, ("self", "fold_ln"), folds),
    Patch("fill_missing_keys", processing.fill_missing_keys, state, "never fill in garbage"),
    Patch("fold_layer_norm", processing.fold_layer_norm, (*state, "fold_biases"), folds),
    Patch("fold_value_biases", processing.fold_value_biases, state, folds),
    Patch("center_writing_weights", processing.center_writing_weights, state, folds),
    Patch("center_unembed", processing.center_unembed, state, folds),
    Patch(
        "refactor_factored_attn_matrices",
        processing.refactor_factored_attn_matrices,
        state,
        folds,
    ),
    Patch(
        "move_model_modules_to_device",
        moving.move_model_modules_to_device,
        ("self",),
        "place by the plan, not by whichever device has most free memory",
    ),
    Patch(
        "to",
        moving.to,
        ("self", "device_or_dtype"),
        "keep the device's index; a dtype keeps the placement",
    ),
    Patch("_apply", moving._apply, ("self", "fn"), "inputs follow the weights when they move"),
    Patch(
        "load_state_dict",
        forward.load_state_dict,
        ("self", "state_dict"),
        "with all weights, a model whose processing was interrupted can be used again",
    ),
    Patch("__setstate__", moving.__setstate__, ("self", "state"), "copies keep the placement"),
    Patch(
        "setup",
        alignment.setup,
        ("self",),
        "SAEs and the like run where they are, whatever block they are attached to",
    ),
    *(Patch(name, *row) for name, row in CACHING.items()),
    Patch(
        "remove_all_hook_fns",
        hook_points.remove_all_hook_fns,
        ("self", "direction", "including_permanent", "level"),
        "hook points without hooks are left alone, which takes a third of a forward's time",
    ),
    Patch(
        "forward",
        block.forward_of_model,
        ("self", "input", "return_type", "start_at_layer", "stop_at_layer"),
        "what leaves the model is at home",
    ),
    *(
        Patch(name, hooked_gathering.stacked(name), (), "stack weights of any devices in one copy")
        for name in gathering.STACKED
    ),
    *(
        Patch(name, gathering.single(name), (), "read on the device of `gather_on`")
        for name in ("W_E", "W_U", "b_U", "W_pos")
    ),
    *(Patch(name, *row) for name, row in GATHERED.items()),
    Patch(
        "forward",
        block.block_forward,
        ("self", "resid_pre", "shortformer_pos_embed", "past_kv_cache_entry"),
        plain,
        owner="TransformerBlock",
    ),
    Patch(
        "forward",
        block.attention_forward,
        ("self", "query_input", "key_input", "value_input", "past_kv_cache_entry"),
        plain,
        owner="AbstractAttention",
    ),
    *(
        Patch(
            name,
            tokenizing.asking_for_tokenizer(name),
            ("self", argument),
            "text without a tokenizer: the error says what to do",
        )
        for name, argument in (
            ("generate", "input"),
            ("input_to_embed", "input"),
            ("to_tokens", "input"),
            ("to_str_tokens", "input"),
            ("to_string", "tokens"),
        )
    ),
    Patch(
        "__enter__",
        tokenizing.override_defaults,
        ("self",),
        "runs in flight do not change what others read",
        owner="LocallyOverridenDefaults",
    ),
    Patch(
        "get_device_for_block_index",
        alignment.get_device_for_block_index,
        ("index", "cfg", "device"),
        "route the residual stream by the placement",
        owner=None,
    ),
    Patch(
        "train",
        moving.train,
        ("model", "config", "dataset"),
        "a spread model is trained where it lies",
        owner=None,
    ),
    Patch(
        "__post_init__",
        config.config_post_init,
        ("self",),
        "n_devices counts devices of the config's own type",
        owner="HookedTransformerConfig",
    ),
)

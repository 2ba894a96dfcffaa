"""What is called of TransformerLens with a HookedTransformer, and what is left out."""

from __future__ import annotations

from typing import Any

import model_calls
import module_calls
import result_calls
from model_calls import hooked, moved, with_more_hooks
from module_calls import trained
from registry import RESID, Calls, Run, left_out, steer

CALLS = Calls()
for _module in (model_calls, result_calls, module_calls):
    CALLS.add(_module.CALLS, "HookedTransformer")
CALLS.calls(
    "HookedTransformer",
    {
        "get_residual": lambda model, at_home: model.get_residual(model.embed(at_home), 0),
        "check_hooks_to_add": lambda run, model: model.check_hooks_to_add(
            model.hook_dict[RESID], RESID, steer(run)
        ),
        "check_and_add_hook": lambda run: hooked(
            run, lambda model: model.check_and_add_hook(model.hook_dict[RESID], RESID, steer(run))
        ),
        "get_pos_offset": lambda model: model.get_pos_offset(None, 2),
        "move_model_modules_to_device": moved(lambda model: model.move_model_modules_to_device()),
        "setup": moved(lambda model: model.setup()),
        "set_tokenizer": moved(lambda model: model.set_tokenizer(model.tokenizer)),
        "set_ungroup_grouped_query_attention": with_more_hooks(
            "set_ungroup_grouped_query_attention", "blocks.4.attn.hook_v"
        ),
    },
)


@CALLS.call("train.train")
def train(run: Run) -> Any:
    from transformer_lens.train import HookedTransformerTrainConfig, train

    return trained(run, train, HookedTransformerTrainConfig)


LEFT_OUT: dict[str, str] = {
    **module_calls.LEFT_OUT,
    **left_out(
        """
HookedTransformer.from_pretrained from_pretrained_no_processing:
    tests/parity/test_from_pretrained.py
HookedTransformer.load_and_process_state_dict process_weights_ fill_missing_keys fold_layer_norm
    fold_value_biases center_unembed center_writing_weights refactor_factored_attn_matrices:
    tests/parity/test_weight_processing.py
HookedTransformer.init_weights: draws anew, so there is nothing to compare with
HookedTransformer.cuda: needs CUDA devices
HookedTransformer.mps: needs Apple's devices
HookedTransformer.load_sample_training_dataset sample_datapoint: fetches a data set
HookPoint.enable_reshape: TransformerBridge's: it converts what hooks see there
ActivationCache.ssm_layers compute_ssm_state compute_ssm_effective_attention:
    TransformerBridge's: HookedTransformer has no state-space layers
train.HookedTransformerTrainConfig: a config; used by train
"""
    ),
}
"""What the sweep does not call, and why."""

REFUSED_OVER_HOSTS = {
    **{f"HookedTransformer.{name}": why for name, why in model_calls.REFUSED_OVER_HOSTS.items()},
    "train.train": model_calls.STAY,
}
"""What is refused if blocks are on other hosts, and why."""

WITHOUT_DEVICES = frozenset(
    {
        *(
            f"HookedTransformer.{name}"
            for name in (
                *("W_E", "W_pos", "W_E_pos", "W_U", "b_U", "tokens_to_residual_directions"),
                *("all_head_labels", "n_params_total", "get_pos_offset", "get_token_position"),
                *("hook_points", "list_hooks", "check_hooks_to_add", "clear_contexts", "cpu"),
                *("to_tokens", "to_string", "to_str_tokens", "to_single_token"),
                "to_single_str_token",
            )
        ),
        *(
            f"head_detector.get_{kind}_token_head_detection_pattern"
            for kind in ("previous", "duplicate")
        ),
        "head_detector.get_induction_head_detection_pattern",
        *(f"HookPoint.{name}" for name in ("layer", "has_hooks", "forward")),
    }
)
"""What holds without tl_devicefix too, as it reads the embeddings, or no weights at all."""

NEW_IN_3 = frozenset(
    {
        "HookedTransformer.generate_stream",
        "HookedTransformer.list_hooks",
        "HookedTransformer.n_params_total",
        "FactoredMatrix.V",
        "HookPoint.has_hooks",
    }
)
"""What is compared, and not in TransformerLens 2.18.0."""

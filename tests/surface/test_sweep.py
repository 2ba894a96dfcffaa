"""Everything public in the installed TransformerLens gives on n devices what it gives on one."""

from __future__ import annotations

from importlib.metadata import version

import calls
import pytest
from calls import (
    ARE_FROZEN,
    FETCH_DATA,
    IN_COMMON,
    OF_MODEL,
    STAY,
    each_somewhere,
    trained,
)
from model_classes import HookedTransformer
from packaging.version import Version
from surface import Run, assert_as_on_one_device, public_names, table
from transformer_lens.train import HookedTransformerTrainConfig, train

import tl_devicefix

pytestmark = pytest.mark.hooked

PUBLIC = public_names((HookedTransformer,), ("patching", "head_detector", "evals", "train"))
OF_HOOKED = table(
    [vars(calls)],
    """
get_residual         model.get_residual(model.embed(at_home), 0)
check_hooks_to_add   model.check_hooks_to_add(point(model), RESID, steer)
check_and_add_hook   twice(copy, tokens, copy.check_and_add_hook(point(copy), RESID, steer))
get_pos_offset       model.get_pos_offset(None, 2)
move_model_modules_to_device   copy.move_model_modules_to_device(), copy(at_home)
setup                copy.setup(), copy(at_home)
set_tokenizer        copy.set_tokenizer(model.tokenizer), copy(at_home)
set_ungroup_grouped_query_attention
    with_more_hooks(copy, tokens, "set_ungroup_grouped_query_attention", "attn.hook_v")
""",
)
CALLS = {
    **{f"HookedTransformer.{name}": call for name, call in {**OF_MODEL, **OF_HOOKED}.items()},
    **IN_COMMON,
    "train.train": lambda run: trained(run, train, HookedTransformerTrainConfig),
}
LEFT_OUT = {
    *FETCH_DATA,
    # Of state space models, which only a Bridge has.
    *("ActivationCache.ssm_layers", "ActivationCache.compute_ssm_state"),
    *("ActivationCache.compute_ssm_effective_attention", "HookPoint.enable_reshape"),
    *(
        f"HookedTransformer.{name}"
        for name in (
            # tests/parity
            *("from_pretrained", "from_pretrained_no_processing", "load_and_process_state_dict"),
            *("process_weights_", "fill_missing_keys", "fold_layer_norm", "fold_value_biases"),
            *("center_unembed", "center_writing_weights", "refactor_factored_attn_matrices"),
            "init_weights",  # draws anew, so there is nothing to compare with
            *("cuda", "mps"),
            *("load_sample_training_dataset", "sample_datapoint"),  # fetch data
        )
    ),
}
REFUSED_OVER_HOSTS = {"HookedTransformer.to dtype": STAY, "train.train": ARE_FROZEN}


def test_every_public_name_is_called_or_left_out():
    known = {call.split()[0] for call in CALLS} | LEFT_OUT
    assert PUBLIC - known == set()
    if Version(version("transformer_lens")) >= Version("3.9"):
        assert known - PUBLIC == set()


def places_of(call):
    """Return the kinds of models that a call has, and over how many devices."""
    if call.startswith("patching."):  # a forward for each layer, head and position
        return [("gpt2", 3), ("llama", 4), ("phi-3", 3)]
    return [("gpt2", 3), ("llama", 1), ("llama", 4), ("phi-3", 3)]


@pytest.mark.parametrize(("call", "kind", "n_devices"), each_somewhere(CALLS, PUBLIC, places_of))
def test_each_public_call_gives_what_one_device_gives(
    call, kind, n_devices, shared, on_one, tokens, pytestconfig
):
    run, reference = Run(shared(kind, n_devices), tokens), Run(on_one(kind), tokens)
    if pytestconfig.getoption("--hosts") and call in REFUSED_OVER_HOSTS:
        with pytest.raises(RuntimeError, match=REFUSED_OVER_HOSTS[call]):
            run.call(CALLS[call])
    else:
        assert_as_on_one_device(CALLS[call], run, reference, tl_devicefix.disabled)

"""Everything public of a TransformerBridge gives on n devices what it gives on one."""

from __future__ import annotations

import contextlib
from functools import cache
from unittest import mock

import pytest
from bridge_calls import OF_ANALYSIS, OF_BRIDGE, OF_LENS
from calls import ARE_FROZEN, FETCH_DATA, IN_COMMON, OF_MODEL, STAY, each_somewhere, trained
from model_classes import TransformerBridge
from surface import Run, assert_as_on_one_device, public_names
from transformer_lens.model_bridge.generalized_components import AttentionBridge
from transformer_lens.tools.analysis import JacobianLens

import tl_devicefix
from tl_devicefix.monkeypatch.versions import has_hooked_transformer

pytestmark = [
    pytest.mark.bridge,
    pytest.mark.filterwarnings("ignore:.*does not support:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*is dispatched across:UserWarning"),
]

PUBLIC = public_names(
    (TransformerBridge, JacobianLens),
    ("patching", "head_detector", "evals", "tools.analysis", "tools.training"),
)


def train(run):
    from transformer_lens.tools.training import TrainConfig, train  # of TransformerLens 4

    return trained(run, train, TrainConfig)


CALLS = {
    **{f"TransformerBridge.{name}": call for name, call in {**OF_MODEL, **OF_BRIDGE}.items()},
    **IN_COMMON,
    "ActivationCache.logit_lens": lambda run: run.cache.logit_lens(),
    **{f"analysis.{name}": call for name, call in OF_ANALYSIS.items()},
    **{f"JacobianLens.{name}": call for name, call in OF_LENS.items()},
    "training.train": train,
}
LEFT_OUT = {
    *FETCH_DATA,
    *("JacobianLens.load", "JacobianLens.from_pretrained"),  # see JacobianLens.save; fetches one
    # Called as analysis.get_act_patch_direct_path; the same of every head
    *(f"{module}.get_act_patch_direct_path_all_sources" for module in ("analysis", "patching")),
    "patching.get_act_patch_direct_path",
    "analysis.reinitialized",  # draws anew, so there is nothing to compare with
    # Of state space models; what one hook point sees
    *("ActivationCache.ssm_layers", "ActivationCache.compute_ssm_state"),
    *("ActivationCache.compute_ssm_effective_attention", "HookPoint.enable_reshape"),
    *(
        f"TransformerBridge.{name}"
        for name in (
            # tests/transformer_bridge
            *("boot_transformers", "process_weights", "enable_compatibility_mode"),
            *("boot_native", "boot_tl_legacy"),  # one device: they place nothing
            *("check_model_support", "list_supported_models"),  # no model
            "init_weights",  # draws anew
            *("cuda", "mps"),
            # Of models of other kinds
            *("diffusion_generate", "encoder_output", "prepare_multimodal_inputs"),
            *("predict_next_sentence", "to_sentence_pair_tokens"),
        )
    ),
}
TRAINS = "the model is in training mode"
RECORDS = "transformers was asked for hidden states or attentions"
REFUSED_OVER_HOSTS = {
    "TransformerBridge.to dtype": STAY,
    "TransformerBridge.to twice": STAY,
    "TransformerBridge.load_state_dict": ARE_FROZEN,
    "TransformerBridge.train": TRAINS,
    "training.train": TRAINS,
    "TransformerBridge.original_model": RECORDS,
    "TransformerBridge.hf_generate": RECORDS,
}

AS_BOOTED = "llama as booted"
PLACES = [("gpt2", 3), ("llama", 4), ("llama", 1), (AS_BOOTED, 3)]
"""Kinds of models and over how many devices; in compatibility mode unless it says otherwise."""
if has_hooked_transformer():  # TransformerLens 3.9, where few use the Bridge
    PLACES = [("gpt2", 3)]


def test_every_public_name_is_called_or_left_out():
    known = {call.split()[0] for call in CALLS} | LEFT_OUT
    assert PUBLIC - known == set()
    if not has_hooked_transformer():
        assert known - PUBLIC == set()


def places_of(call):
    """Return the kinds of models that a call has, and over how many devices."""
    if call.startswith("JacobianLens."):
        return [(AS_BOOTED, 3)]  # which refuses compatibility mode
    if call.startswith("patching."):
        return [("llama", 4)]  # a forward for each layer, head and position
    if call == "evals.ioi_eval":  # which hands over tokens on the CPU: one device refuses them
        return [("gpt2", 3), ("llama", 4)]
    is_for_folded = call == "analysis.direct_logit_attribution"  # which refuses others
    if call.startswith(("TransformerBridge.", "analysis.")) and not is_for_folded:
        return PLACES
    return [(kind, n_devices) for kind, n_devices in PLACES if kind != AS_BOOTED]


@pytest.fixture(scope="module")
def runs(checkpoints, tokens):
    """`runs("gpt2", 4)`: a Bridge over devices of a machine that is open for the whole module.

    Without a number of devices, the unpatched one on the CPU. Booted once; calls change copies.
    """

    def boot(kind, **options):
        bridge = TransformerBridge.boot_transformers(str(checkpoints(kind.split()[0])), **options)
        if kind != AS_BOOTED:
            bridge.enable_compatibility_mode()
        return bridge

    def get(kind, n_devices=None):
        if n_devices is None:
            with tl_devicefix.disabled():
                return Run(boot(kind, device="cpu"), tokens, unused=boot(kind, device="cpu"))
        bridge = boot(kind, n_devices=n_devices)
        return Run(bridge, tokens.to(bridge.cfg.device), unused=boot(kind, n_devices=n_devices))

    with tl_devicefix.simulate(4):
        yield cache(get)


@contextlib.contextmanager
def unpatched():
    """TransformerLens as installed, but that it reads transformers 5.24's name of a KV cache."""
    with tl_devicefix.disabled():
        update = AttentionBridge._update_kv_cache

        def knowing(self, *args, cache=None, **kwargs):
            return update(self, *args, **{"past_key_values": cache, **kwargs})

        with mock.patch.object(AttentionBridge, "_update_kv_cache", knowing):
            yield


@pytest.mark.parametrize(("call", "kind", "n_devices"), each_somewhere(CALLS, PUBLIC, places_of))
def test_each_bridge_call_gives_what_one_device_gives(call, kind, n_devices, runs, pytestconfig):
    if has_hooked_transformer() and call == "JacobianLens.occupancy":
        pytest.skip("TransformerLens 3.9 makes a random generator on the device, simulated or not")
    if pytestconfig.getoption("--hosts") and call in REFUSED_OVER_HOSTS:
        with pytest.raises(RuntimeError, match=REFUSED_OVER_HOSTS[call]):
            runs(kind, n_devices).call(CALLS[call])
    else:
        assert_as_on_one_device(CALLS[call], runs(kind, n_devices), runs(kind), unpatched)

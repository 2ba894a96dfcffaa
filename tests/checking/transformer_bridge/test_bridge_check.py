"""`tl_devicefix.check` of a Bridge: what is its own; the rest is what it is for either class."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hf_models import D_VOCAB, HF_CONFIGS

from tl_devicefix import check
from tl_devicefix.monkeypatch.versions import has_hooked_transformer

# In TransformerLens 3.9 it is the same code.
NAMES = ["llama", "gpt2", "gemma-2", "mixtral"] if has_hooked_transformer() else [*HF_CONFIGS]

pytestmark = pytest.mark.filterwarnings("ignore:.*does not support:UserWarning")


@pytest.mark.parametrize("name", NAMES)
def test_a_booted_bridge_is_well_before_and_after_folding(
    name: str, boot: Any, machine: Any, tokens: torch.Tensor
) -> None:
    bridge = boot(name, n_devices=3)
    for fold in (False, True):
        if fold:
            bridge.enable_compatibility_mode()
        report = check(bridge)
        assert (report.findings, report.notes) == ((), ())
        held = [machine.memory_allocated(index) for index in range(3)]
        assert [item.held for item in report.memory] == held
    bridge(tokens)
    assert check(bridge), check(bridge)


def test_parameters_in_one_memory_are_counted_once(references: Any, hf_models: Any) -> None:
    expected = sum(parameter.numel() for parameter in hf_models("gemma-2").parameters())
    zeros = D_VOCAB  # a bias of the unembedding, which the release adds
    assert check(references("gemma-2")).n_parameters in (expected, expected + zeros)


def test_processing_without_folding_leaves_all_norms(boot: Any, machine: Any) -> None:
    bridge = boot("llama", n_devices=3)
    bridge.enable_compatibility_mode(fold_ln=False)
    assert check(bridge), check(bridge)


def test_a_repair_keeps_what_is_tied_tied(boot: Any, machine: Any) -> None:
    bridge = boot("gpt2", n_devices=3)
    bridge.embed.to("sim:2")

    assert check(bridge, repair=True), check(bridge)

    embed, unembed = bridge.embed._original_component, bridge.unembed._original_component
    assert embed.weight is unembed.weight
    assert embed.weight.device == machine.devices[0]

"""HookedTransformer and TransformerBridge give the shipped checkpoint the same logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from tl_devicefix.demo.demo import CHECKPOINT, hf_logits
from tl_devicefix.demo.recall_task import recall_prompts
from tl_devicefix.monkeypatch.versions import has_bridge, has_hooked_transformer

TOLERANCE = 5e-5
"""Of logits up to 23; transformers' own, in float32, are 3e-5 from its float64 ones."""

needs_hooked_transformer = pytest.mark.skipif(
    not has_hooked_transformer(), reason="TransformerLens 4 has no HookedTransformer"
)
needs_bridge = pytest.mark.skipif(
    not has_bridge(), reason="TransformerBridge is patched from TransformerLens 3.9 on"
)


def of_hooked_transformer(tokens: torch.Tensor, n_devices: int) -> torch.Tensor:
    from transformer_lens import HookedTransformer

    model = HookedTransformer.from_pretrained(str(CHECKPOINT), n_devices=n_devices)
    return model(tokens)


def of_bridge(tokens: torch.Tensor, n_devices: int) -> torch.Tensor:
    from transformer_lens.model_bridge import TransformerBridge

    bridge = TransformerBridge.boot_transformers(str(CHECKPOINT), n_devices=n_devices)
    bridge.enable_compatibility_mode()
    return bridge(tokens)


@pytest.fixture(scope="module")
def prompts() -> torch.Tensor:
    texts = [prompt.text for prompt in recall_prompts(16, seed=0, n_facts=8)]
    return AutoTokenizer.from_pretrained(CHECKPOINT)(texts, return_tensors="pt").input_ids


@torch.no_grad()
@pytest.mark.parametrize(
    "logits_of",
    [
        pytest.param(of_hooked_transformer, marks=needs_hooked_transformer),
        pytest.param(of_bridge, marks=needs_bridge),
    ],
)
def test_the_logits_are_those_of_transformers_centred_over_the_vocabulary(
    logits_of: Callable[..., torch.Tensor], prompts: torch.Tensor, machine: Any
) -> None:
    logits = logits_of(prompts.to(machine.devices[0]), n_devices=4)
    expected = hf_logits(prompts)
    expected -= expected.mean(dim=-1, keepdim=True)  # as `center_unembed` does
    assert logits.device == machine.devices[0]
    torch.testing.assert_close(logits.cpu(), expected, rtol=0, atol=TOLERANCE)


@torch.no_grad()
@needs_hooked_transformer
@needs_bridge
def test_both_classes_give_the_same_logits(prompts: torch.Tensor, machine: Any) -> None:
    at_home = prompts.to(machine.devices[0])
    ours, theirs = of_bridge(at_home, n_devices=4), of_hooked_transformer(at_home, n_devices=4)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)

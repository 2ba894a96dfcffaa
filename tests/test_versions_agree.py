"""HookedTransformer and TransformerBridge give the shipped checkpoint transformers' logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from either_class import CLASSES, HOOKED
from transformers import AutoTokenizer

from tl_devicefix.demo.demo import CHECKPOINT, hf_logits
from tl_devicefix.demo.recall_task import recall_prompts

TOLERANCE = 5e-5
"""Of logits up to 23; transformers' own, in float32, are 3e-5 from its float64 ones."""


def loaded(cls: str) -> Any:
    if cls == HOOKED:
        from transformer_lens import HookedTransformer

        return HookedTransformer.from_pretrained(str(CHECKPOINT), n_devices=4)
    from transformer_lens.model_bridge import TransformerBridge

    bridge = TransformerBridge.boot_transformers(str(CHECKPOINT), n_devices=4)
    bridge.enable_compatibility_mode()
    return bridge


@torch.no_grad()
@pytest.mark.parametrize("cls", CLASSES)
def test_the_logits_are_those_of_transformers_centred_over_the_vocabulary(
    cls: str, machine: Any
) -> None:
    texts = [prompt.text for prompt in recall_prompts(16, seed=0, n_facts=8)]
    prompts = AutoTokenizer.from_pretrained(CHECKPOINT)(texts, return_tensors="pt").input_ids
    logits = loaded(cls)(prompts.to(machine.devices[0]))
    expected = hf_logits(prompts)
    expected -= expected.mean(dim=-1, keepdim=True)  # as `center_unembed` does
    assert logits.device == machine.devices[0]
    torch.testing.assert_close(logits.cpu(), expected, rtol=0, atol=TOLERANCE)

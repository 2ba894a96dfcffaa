"""accelerate with models over several devices: `Accelerator`, and maps that divide blocks."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator, dispatch_model
from accelerate.state import AcceleratorState
from comparison import assert_agrees
from hf_models import N_LAYERS

import tl_devicefix
from tl_devicefix.monkeypatch.versions import has_bridge


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    """As a script makes one; it keeps its state in the process."""
    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)


def devices_of(model: Any) -> list[torch.device]:
    return [parameter.device for parameter in model.parameters()]


def losses_of_training(accelerator: Accelerator, model: Any, tokens: torch.Tensor) -> list[float]:
    """Two steps as accelerate's guide has them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for _ in range(3):
        loss = model(tokens, return_type="loss")
        losses.append(loss.item())
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_prepare_leaves_a_spread_model_where_it_lies_and_trains_it(
    over_devices: Any, on_one: Any, accelerator: Accelerator, tokens: torch.Tensor
) -> None:
    model, reference = over_devices("llama"), copy.deepcopy(on_one("llama"))
    before = devices_of(model)

    actual = losses_of_training(accelerator, model, tokens)

    assert_agrees(actual, losses_of_training(accelerator, reference, tokens), tolerance=1e-4)
    assert devices_of(model) == before


# Hugging Face models whose blocks are divided. transformers cannot run the second of them, as the
# residual stream comes back from another device than it went to.
DIVIDED = {
    "within its MLP": ["mlp.gate_proj", "mlp.up_proj"],
    "into attention and MLP": ["mlp", "post_attention_layernorm"],
}


def divided(hf_model: Any, elsewhere: list[str]) -> Any:
    names = [name for name, module in hf_model.named_modules() if not list(module.children())]
    paths = tuple(f"layers.{i}.{path}" for i in range(N_LAYERS) for path in elsewhere)
    device_map = {
        name: "sim:1" if name.removeprefix("model.").startswith(paths) else "sim:0"
        for name in names
    }
    return dispatch_model(copy.deepcopy(hf_model), device_map)


@pytest.mark.skipif(not has_bridge(), reason="this TransformerLens has no TransformerBridge")
@pytest.mark.parametrize("how", DIVIDED)
def test_a_bridge_over_divided_blocks_runs_within_mix_devices(
    how: str, checkpoints: Any, hf_models: Any, tokenizer: Any, machine: Any, tokens: torch.Tensor
) -> None:
    from transformer_lens.model_bridge import TransformerBridge

    def boot(hf_model: Any) -> Any:
        return TransformerBridge.boot_transformers(
            str(checkpoints("llama")), hf_model=hf_model, tokenizer=tokenizer
        )

    reference = boot(copy.deepcopy(hf_models("llama")))
    bridge = boot(divided(hf_models("llama"), DIVIDED[how]))

    with tl_devicefix.mix_devices():
        for compatible in (False, True):
            if compatible:
                reference.enable_compatibility_mode()
                bridge.enable_compatibility_mode()
            expected, expected_cache = reference.run_with_cache(tokens)
            logits, cache = bridge.run_with_cache(tokens)
            assert_agrees(logits, expected)
            assert_agrees(cache["blocks.3.hook_out"], expected_cache["blocks.3.hook_out"])

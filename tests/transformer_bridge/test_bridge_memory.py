"""Compatibility mode holds little more than one component twice on a device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_models import D_VOCAB, make_hf_model, save_checkpoint
from transformer_lens.model_bridge import TransformerBridge


def llama() -> transformers.PretrainedConfig:
    return transformers.LlamaConfig(
        vocab_size=D_VOCAB, hidden_size=64, intermediate_size=192, num_hidden_layers=8,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip


def gpt2() -> transformers.PretrainedConfig:
    return transformers.GPT2Config(
        vocab_size=D_VOCAB, n_embd=64, n_layer=8, n_head=4, n_positions=32
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("config", [llama, gpt2])
def test_one_block_in_float32_beside_the_model(
    config: Any, dtype: torch.dtype, machine: Any, tokenizer: Any, tmp_path: Path
) -> None:
    save_checkpoint(make_hf_model(config(), dtype), tokenizer, tmp_path)
    bridge = TransformerBridge.boot_transformers(str(tmp_path), n_devices=4, dtype=dtype)
    indices = range(4)
    held = [machine.memory_allocated(index) for index in indices]
    for index in indices:
        machine.reset_peak_memory_stats(index)

    bridge.enable_compatibility_mode()

    sizes = {each.name: each.weights for each in bridge.placement.components}
    in_float32 = sizes["blocks.0"] * 4 // dtype.itemsize
    for index in indices:
        kept = max(held[index], machine.memory_allocated(index))
        assert machine.max_memory_allocated(index) - kept < 1.5 * in_float32


def test_nothing_is_left_on_the_host_or_the_devices(machine: Any, boot: Any) -> None:
    bridge = boot("llama", n_devices=4)
    held = [machine.memory_allocated(index) for index in range(4)]

    bridge.enable_compatibility_mode()

    assert [machine.memory_allocated(index) for index in range(4)] == held

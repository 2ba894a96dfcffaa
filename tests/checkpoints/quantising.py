"""Models that bitsandbytes quantised, and the same models with the values that they then have."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

bitsandbytes: Any = pytest.importorskip("bitsandbytes")

KINDS: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4, scales quantised too": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
    },
    "int8": {"load_in_8bit": True},
}


def quantise(checkpoint: Path, kind: str) -> PreTrainedModel:
    """Load a checkpoint as transformers quantises it, on the CPU."""
    return AutoModelForCausalLM.from_pretrained(
        checkpoint,
        torch_dtype=torch.float32,
        device_map="cpu",
        quantization_config=BitsAndBytesConfig(**KINDS[kind]),
    ).eval()


@torch.no_grad()
def dequantised(
    hf_model: torch.nn.Module, plain: PreTrainedModel, rounded: bool = False
) -> PreTrainedModel:
    """A copy of `plain` with the values that the quantised model's weights have.

    Args:
        hf_model: of which no forward has been run.
        plain: the model that was quantised.
        rounded: whether the scales are those that the kernel for CPUs uses.
    """
    plain = copy.deepcopy(plain)
    for name, module in hf_model.named_modules():
        if type(module).__module__.startswith("bitsandbytes"):
            layer = plain.get_submodule(name)
            weight = values(module.weight, rounded)
            layer.weight.copy_(weight.T if isinstance(layer, Conv1D) else weight)
    return plain


def values(weight: Any, rounded: bool = False) -> torch.Tensor:
    """What a quantised weight stands for, by bitsandbytes' own functions."""
    functional = bitsandbytes.functional
    if isinstance(weight, bitsandbytes.nn.Int8Params):
        return functional.int8_vectorwise_dequant(weight.data, weight.SCB)
    state = copy.deepcopy(weight.quant_state)
    if rounded:
        if state.nested:
            state.absmax = functional.dequantize_blockwise(state.absmax, state.state2)
            state.absmax, state.nested = state.absmax + state.offset, False
        state.absmax = state.absmax.bfloat16().float()
    return functional.dequantize_4bit(weight.data, state)


def is_repacked(hf_model: torch.nn.Module) -> bool:
    """Whether a forward on a CPU with AVX512-BF16 has changed how the 4-bit weights lie."""
    states = (getattr(p, "quant_state", None) for p in hf_model.parameters())
    return any(getattr(state, "packing_format_for_cpu", False) for state in states)

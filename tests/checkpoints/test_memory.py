"""What loading holds beside the model: about one block, however the weights are stored."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from transformer_lens import HookedTransformer
from wide import WIDE

CPU = torch.device("cpu")


@pytest.fixture
def make(wide_models: Any, quantised: Any, tmp_path: Path) -> Callable[[str, str], Any]:
    """`make("gpt2", "LoRA")`: a model whose weights have to be computed or fetched."""

    def make(name: str, how: str) -> Any:
        from adapting import GPT2, LLAMA, lora

        targets = {"mistral": LLAMA, "gpt2": GPT2}[name]
        conv = {"fan_in_fan_out": name == "gpt2"}
        if how in ("nf4", "int8"):
            return quantised(name, how)
        if how == "LoRA on nf4":
            return lora(*targets)(quantised(name, "nf4"))
        hf_model = copy.deepcopy(wide_models(name))
        if how == "disk":
            return accelerate.disk_offload(hf_model, tmp_path, CPU)
        return lora(*targets, use_dora=how == "DoRA", **conv)(hf_model)

    return make


@pytest.mark.cover(("name", "how"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("how", ["LoRA", "DoRA", "nf4", "int8", "LoRA on nf4", "disk"])
@pytest.mark.parametrize("name", WIDE)
def test_computing_weights_takes_about_a_block_of_memory_and_only_while_loading(
    name: str,
    how: str,
    dtype: torch.dtype,
    make: Any,
    wide_models: Any,
    load: Any,
    machine: Any,
) -> None:
    """Beyond what loading a plain model takes: the block in float32, and for DoRA a layer of it."""

    def load_on(device: str, hf_model: Any) -> HookedTransformer:
        return load(WIDE[name], hf_model, n_devices=1, device=device, dtype=dtype)

    model = load_on("sim:0", wide_models(name))
    same_model = load_on("sim:1", make(name, how))
    gc.collect()

    block = max(c.weights for c in model.placement.components) * 4 // dtype.itemsize
    extra = machine.max_memory_allocated("sim:1") - machine.max_memory_allocated("sim:0")
    assert extra <= 1.4 * block
    share = same_model.placement.bytes_on(torch.device("sim:1"))
    assert machine.memory_allocated("sim:1") == share == machine.memory_allocated("sim:0")

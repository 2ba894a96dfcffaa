"""Bridges over simulated devices, and what the unpatched release makes of them on one CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import N_LAYERS
from on_demand import OnDemand
from transformer_lens.model_bridge import TransformerBridge

import tl_devicefix
from tl_devicefix.simulation.machine import Machine

MODULES = {
    "llama": (("model.embed_tokens", "model.rotary_emb", "lm_head"), "model.layers", "model.norm"),
    "gpt2": (
        ("transformer.wte", "transformer.wpe", "transformer.drop", "lm_head"),
        "transformer.h",
        "transformer.ln_f",
    ),
}
"""Modules of Hugging Face models: those at home, the blocks, and the final norm."""


@pytest.fixture(scope="session")
def references(checkpoints: Any) -> Callable[..., Any]:
    """`references("gpt2", compatible=True)`: as the unpatched release boots it, on one CPU.

    Shared, so not to be changed. Other options are those of `enable_compatibility_mode`.
    """

    def boot(
        name: str, *, compatible: bool = False, dtype: torch.dtype = torch.float32, **options: Any
    ) -> Any:
        with tl_devicefix.disabled():
            bridge = TransformerBridge.boot_transformers(
                str(checkpoints(name)), device="cpu", dtype=dtype
            )
            if compatible:
                bridge.enable_compatibility_mode(**options)
        return bridge

    return OnDemand(boot)


@pytest.fixture
def dispatched(checkpoints: Any, machine: Machine) -> Callable[[str], Any]:
    """`dispatched("llama")`: over the devices as accelerate's "balanced" does it, as booted.

    The final norm follows the last block, which is not where the package's own plan puts it; the
    unpatched release takes such a map too.
    """

    def boot(name: str) -> Any:
        n = len(machine.devices)
        lie = {layer: f"sim:{min(layer * n // N_LAYERS, n - 1)}" for layer in range(N_LAYERS)}
        first, blocks, last = MODULES[name]
        device_map = dict.fromkeys(first, "sim:0")
        device_map |= {f"{blocks}.{layer}": device for layer, device in lie.items()}
        device_map[last] = lie[N_LAYERS - 1]
        return TransformerBridge.boot_transformers(str(checkpoints(name)), device_map=device_map)

    return boot


@pytest.fixture
def boot(checkpoints: Any) -> Callable[..., Any]:
    """`boot("gpt2", n_devices=4)`: a new Bridge, from a checkpoint; `compatible=True` folds it."""

    def boot(name: str, *, compatible: bool = False, **options: Any) -> Any:
        directory: Path = checkpoints(name)
        bridge = TransformerBridge.boot_transformers(str(directory), **options)
        if compatible:
            bridge.enable_compatibility_mode()
        return bridge

    return boot

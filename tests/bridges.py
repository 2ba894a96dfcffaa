"""Bridges over simulated devices, and what the unpatched release makes of them on one CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import N_LAYERS
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


def balanced_map(name: str, devices: list[Any]) -> dict[str, str]:
    """A `device_map` for transformers, as accelerate's "balanced": the final norm lies last.

    That is not where the package's own plan puts it.
    """
    first, blocks, last = MODULES.get(name, MODULES["llama"])
    device_map = dict.fromkeys(first, str(devices[0]))
    for layer in range(N_LAYERS):
        device_map[f"{blocks}.{layer}"] = str(devices[layer * len(devices) // N_LAYERS])
    return {**device_map, last: str(devices[-1])}


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

    return cache(boot)


@pytest.fixture
def dispatched(checkpoints: Any, machine: Machine) -> Callable[[str], Any]:
    """`dispatched("llama")`: over the devices by `balanced_map`, as booted."""

    def boot(name: str) -> Any:
        device_map = balanced_map(name, list(machine.devices))
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

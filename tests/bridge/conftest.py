"""Bridges over simulated devices, and what the unpatched release makes of them on one CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from on_demand import OnDemand
from transformer_lens.model_bridge import TransformerBridge

import tl_devicefix


@pytest.fixture(scope="session")
def references(checkpoints: Any) -> Callable[..., Any]:
    """`references("gpt2", compatible=True)`: as the unpatched release boots it, on one CPU.

    Shared, so not to be changed. Other options are those of `enable_compatibility_mode`.
    """

    def boot(
        name: str, *, compatible: bool = False, dtype: torch.dtype = torch.float32, **options: Any
    ) -> Any:
        with tl_devicefix.unpatched():
            bridge = TransformerBridge.boot_transformers(
                str(checkpoints(name)), device="cpu", dtype=dtype
            )
            if compatible:
                bridge.enable_compatibility_mode(**options)
        return bridge

    return OnDemand(boot)


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

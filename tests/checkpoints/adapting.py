"""Adapters as training leaves them: with values of their own, the same each time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

peft: Any = pytest.importorskip("peft")

Adapt = Callable[[PreTrainedModel], Any]
"""Puts adapters on a model, which is changed by it."""

LLAMA = ("q_proj", "v_proj", "down_proj")
GPT2 = ("c_attn", "c_proj", "c_fc")


def config(*targets: str, **options: Any) -> Any:
    options = {"r": 4, "task_type": "CAUSAL_LM", **options}
    return peft.LoraConfig(target_modules=list(targets), **options)


def lora(*targets: str, **options: Any) -> Adapt:
    """`lora("q_proj")(model)` is that model with LoRA on its q_projs."""
    return adapter(config(*targets, **options))


def adapter(*configs: Any, active: Iterable[str] = ("0",)) -> Adapt:
    """`adapter(one, two, active=["0", "1"])(model)`: the adapters are called "0", "1", ..."""

    def adapt(model: PreTrainedModel) -> Any:
        given = set(model.parameters())
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            adapted = peft.get_peft_model(model, configs[0], adapter_name="0")
            for i, config in enumerate(configs[1:], start=1):
                adapted.add_adapter(str(i), config)
            train(p for p in adapted.parameters() if p not in given or p.requires_grad)
        adapted.base_model.set_adapter(list(active))
        return adapted.eval()

    return adapt


@torch.no_grad()
def train(parameters: Iterable[torch.nn.Parameter]) -> None:
    """As if they had been trained: no parameter has its initial value, be it zero or one."""
    for parameter in parameters:
        if parameter.is_floating_point():  # or it is one of bitsandbytes', wrapped anew
            parameter.add_(torch.randn(parameter.shape, dtype=torch.float32), alpha=0.2)

"""How models are broken, and what a check finds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from devices import device
from hf_models import D_MODEL
from model_classes import BRIDGE, HOOKED
from torch import nn

from tl_devicefix.monkeypatch.versions import has_hooked_transformer

if has_hooked_transformer():
    from transformer_lens.components import TransformerBlock


class Fault(NamedTuple):
    """How a model is broken, what is found, how the given line begins, and whether it mends."""

    breaks: Callable[[Any], Any]
    kind: str
    name: str
    says: tuple[str, ...]
    fix: str
    mends: bool = True


def block_moved(model: Any) -> None:
    model.blocks[2].to(device(0))


def home_renamed(model: Any) -> None:
    model.cfg.device = device(1)


def identity(activation: Any, hook: Any) -> None:
    pass


def pytorch_hook_left(model: Any) -> None:
    model.blocks[2].register_forward_hook(lambda *args: None)


def parameter_replaced(model: Any) -> None:
    model.unembed.W_U = nn.Parameter(model.unembed.W_U.detach().to(device(2)))


def some_parameters_moved(model: Any) -> None:
    for name in ("_W_K", "W_Q"):
        parameter = getattr(model.blocks[4].attn, name)
        parameter.data = parameter.data.to("cpu")


def block_replaced(model: Any) -> None:
    weights = model.blocks[2].state_dict()
    model.blocks[2] = TransformerBlock(model.cfg, 2).to(device(2))
    model.blocks[2].load_state_dict(weights, strict=False)


def backward_hook_left(model: Any) -> None:
    model.blocks[2].hook_resid_post.add_hook(identity, dir="bwd")


def mlp_replaced_in_the_wrapped_model(model: Any) -> None:
    model.original_model.model.layers[2].mlp = nn.Linear(D_MODEL, D_MODEL).to(device(0))


def weight_moved(model: Any) -> None:
    weight = model.blocks[4].attn.q._original_component.weight
    weight.data = weight.data.to("cpu")


def hook_left(model: Any) -> None:
    model.add_hook("blocks.2.hook_resid_post", identity)


OF_EITHER = [
    Fault(block_moved, "device", "blocks.2",
          (f"is on {device(0)}", f"placement puts it on {device(2)}"),
          f'model.blocks[2].to("{device(2)}")'),
    Fault(pytorch_hook_left, "hooks", "blocks.2", ("PyTorch forward hook", "lambda"),
          "del model.blocks[2]._forward_hooks["),
    Fault(home_renamed, "config", "cfg.device", (f"'{device(1)}'", f"home is {device(0)}"),
          f'model.cfg.device = "{device(0)}"'),
]  # fmt: skip
FAULTS = {
    HOOKED: [
        *OF_EITHER,
        Fault(parameter_replaced, "device", "unembed.W_U",
              (f"is on {device(2)}", f"puts it on {device(0)}", "2.5 KiB"),
              f'model.unembed.to("{device(0)}")'),
        Fault(some_parameters_moved, "device", "W_Q, _W_K of blocks.4.attn",
              ("is on cpu", f"puts it on {device(3)}"), f'model.blocks[4].attn.to("{device(3)}")'),
        Fault(block_replaced, "setup", "blocks.2", ("has changed since",), "model.setup()"),
        Fault(backward_hook_left, "hooks", "blocks.2.hook_resid_post", ("identity",),
              "model.reset_hooks()"),
    ],
    BRIDGE: [
        *OF_EITHER,
        Fault(mlp_replaced_in_the_wrapped_model, "device", "blocks.2._original_component.mlp",
              (f"is on {device(0)}", f"puts it on {device(2)}"),
              f'model.blocks[2]._original_component.mlp.to("{device(2)}")', mends=False),
        Fault(weight_moved, "device", "blocks.4.attn.q", ("is on cpu", f"puts it on {device(3)}"),
              f'model.blocks[4].attn.q.to("{device(3)}")'),
        Fault(hook_left, "hooks", "blocks.2.hook_out", ("identity",), "model.reset_hooks()"),
    ],
}  # fmt: skip
MISPLACED = (block_moved, parameter_replaced, some_parameters_moved, weight_moved, home_renamed)
"""What a repair brings back."""

"""How models of either class are broken, and what a check finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Fault:
    """How a model is broken, what is found, and what the line that is given mends."""

    breaks: Callable[[Any], Any]
    kind: str
    name: str
    says: tuple[str, ...]
    fix: str | None
    """How the line begins."""
    mends: bool = True
    """Whether the results are the reference's after it."""


def block_moved(model: Any) -> None:
    model.blocks[2].to("sim:0")


def home_renamed(model: Any) -> None:
    model.cfg.device = "sim:1"


def identity(activation: Any, hook: Any) -> None:
    pass


def pytorch_hook_left(model: Any) -> None:
    model.blocks[2].register_forward_hook(lambda *args: None)


OF_EITHER = {
    "a block moved by hand": Fault(
        block_moved, "device", "blocks.2",
        ("is on sim:0", "placement puts it on sim:2"), 'model.blocks[2].to("sim:2")',
    ),
    "a PyTorch hook": Fault(
        pytorch_hook_left, "hooks", "blocks.2", ("PyTorch forward hook", "lambda"),
        "del model.blocks[2]._forward_hooks[",
    ),
    "a config of another device": Fault(
        home_renamed, "config", "cfg.device", ("'sim:1'", "home is sim:0"),
        'model.cfg.device = "sim:0"',
    ),
}  # fmt: skip

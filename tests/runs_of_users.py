"""Runs as users write them, and a count of the blocks that they compute."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

LAST = "blocks.4.hook_resid_post"
GREEDY: dict[str, Any] = {
    "do_sample": False, "stop_at_eos": False, "max_new_tokens": 3, "verbose": False,
}  # fmt: skip


def logits(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return model(batch)


def generated(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return model.generate(batch[:1].to(model.cfg.device), **GREEDY)


def looped(model: Any, tokens: Any, runs: Any, **arguments: Any) -> list[Any]:
    """Return what `sweep` gives, computed one run after the other."""
    return [model.run_with_hooks(tokens, fwd_hooks=run, **arguments) for run in runs]


@contextlib.contextmanager
def blocks_run(model: Any) -> Iterator[SimpleNamespace]:
    """Counts, as `blocks`; with no hook, as one changes what a sweep may skip."""
    count, model_class = SimpleNamespace(blocks=0), type(model.blocks[0])
    own = model_class.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        count.blocks += 1
        return own(self, *args, **kwargs)

    with mock.patch.object(model_class, "forward", forward):
        yield count


def double(activation: torch.Tensor, hook: object) -> torch.Tensor:
    return activation * 2


def own_forward(module: torch.nn.Module) -> None:
    vars(module)["forward"] = lambda *args, **kw: type(module).forward(module, *args, **kw)


def metric(logits: torch.Tensor) -> torch.Tensor:
    return logits[0, -1, 5] - logits[0, -1, 7]

"""Runs as users write them: most take a model and a batch, as `pipeline_map` calls them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

LAST = "blocks.4.hook_resid_post"
GREEDY: dict[str, Any] = {
    "do_sample": False, "stop_at_eos": False, "max_new_tokens": 3, "verbose": False,
}  # fmt: skip
Run = Callable[[Any, torch.Tensor], Any]


def logits(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return model(batch)


def some_of_the_cache(model: Any, batch: torch.Tensor) -> Any:
    _, cache = model.run_with_cache(batch, names_filter=lambda name: "resid_post" in name)
    return {name: cache[name] for name in cache}


def steered_at_a_block_elsewhere(model: Any, batch: torch.Tensor) -> torch.Tensor:
    vector = torch.linspace(-1, 1, model.cfg.d_model, device=model.cfg.device)
    return model.run_with_hooks(batch, fwd_hooks=[(LAST, lambda a, hook: a + vector.to(a.dtype))])


def generated(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return model.generate(batch[:1].to(model.cfg.device), **GREEDY)


def a_number_that_is_waited_for(model: Any, batch: torch.Tensor) -> list[float]:
    seen: list[float] = []

    def look(activation: torch.Tensor, hook: Any) -> None:
        seen.append(activation.sum().item())

    model.run_with_hooks(batch, fwd_hooks=[(f"blocks.{i}.hook_resid_pre", look) for i in (1, 4)])
    return seen


def looped(model: Any, tokens: Any, runs: Any, **arguments: Any) -> list[Any]:
    """Return what `sweep` gives, computed one run after the other."""
    return [model.run_with_hooks(tokens, fwd_hooks=run, **arguments) for run in runs]


def metric(logits: torch.Tensor) -> torch.Tensor:
    return logits[0, -1, 5] - logits[0, -1, 7]

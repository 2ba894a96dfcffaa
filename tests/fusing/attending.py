"""Runs of fused models, and what they compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from comparison import assert_agrees
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tl_devicefix


def unfused(model: Any, run: Callable[[Any], Any]) -> Any:
    """Return a run's result with TransformerLens's own forward, then fuse the model again."""
    tl_devicefix.unfuse_blocks(model)
    try:
        return run(model)
    finally:
        tl_devicefix.fuse_blocks(model)


def assert_either_way(model: Any, run: Callable[[Any], Any], tolerance: float = 1e-5) -> Any:
    """Assert that a run of a fused model gives the same as TransformerLens's own forward."""
    actual = run(model)  # first: a newly fused model checks all of its blocks
    assert_agrees(actual, unfused(model, run), tolerance=tolerance)
    return actual


def with_gradients(tokens: torch.Tensor, **options: Any) -> Callable[[Any], Any]:
    """Return a run that gives logits, and the gradients of a loss."""

    def run(model: Any) -> Any:
        logits = model(tokens, **options)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return logits, torch.autograd.grad(loss, weights, allow_unused=True)

    return run


class ShapesMade(TorchDispatchMode):
    """Collects the shapes of all tensors that operations return within it, views too."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(  # type: ignore[override]
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = (tensor for tensor in tree_leaves(result) if isinstance(tensor, torch.Tensor))
        self.shapes.update(tuple(tensor.shape) for tensor in tensors)
        return result

    def of_pairs(self, n_tokens: int) -> list[tuple[int, ...]]:
        """Return the shapes with `n_tokens` twice, such as scores; no other size may equal it."""
        return [shape for shape in self.shapes if shape.count(n_tokens) > 1]

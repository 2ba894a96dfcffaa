"""The shapes of the tensors that operations make."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class ShapesMade(TorchDispatchMode):
    """Within it, the shapes of all tensors that are made, views among them."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(  # type: ignore[override]
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = (each for each in tree_leaves(result) if isinstance(each, torch.Tensor))
        self.shapes.update(tuple(each.shape) for each in tensors)
        return result

    def of_pairs(self, n_tokens: int) -> list[tuple[int, ...]]:
        """Those of every query and key, of a number of tokens that no other size is."""
        return [shape for shape in self.shapes if shape.count(n_tokens) > 1]

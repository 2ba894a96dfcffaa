"""The operations of a run, and the shapes of the tensors that they make."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class ShapesMade(TorchDispatchMode):
    """Within it, all operations, and the shapes of what they make, views among them."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()
        self.operations: Counter[str] = Counter()

    def __torch_dispatch__(  # type: ignore[override]
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operations[str(func)] += 1
        tensors = (tensor for tensor in tree_leaves(result) if isinstance(tensor, torch.Tensor))
        self.shapes.update(tuple(tensor.shape) for tensor in tensors)
        return result

    def of_pairs(self, n_tokens: int) -> list[tuple[int, ...]]:
        """Those of every query and key, of a number of tokens that no other size is."""
        return [shape for shape in self.shapes if shape.count(n_tokens) > 1]

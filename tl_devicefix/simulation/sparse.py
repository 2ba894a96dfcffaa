"""Sparse tensors: the dense ones that they hold, which take the memory."""

from __future__ import annotations

import torch


def parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The dense tensors that a tensor holds: its values, then its indices if it is sparse.

    Raises:
        NotImplementedError: if it is in a layout that simulated devices do not have.
    """
    if tensor.layout is torch.strided:
        return [tensor]
    if tensor.layout is torch.sparse_coo:
        return [tensor._values(), tensor._indices()]
    raise NotImplementedError(
        f"simulated devices have no tensors of layout {tensor.layout}: use to_sparse(), or the CPU"
    )


def bytes_in(tensor: torch.Tensor) -> int:
    """The bytes of all that a tensor holds."""
    return sum(part.nbytes for part in parts(tensor))

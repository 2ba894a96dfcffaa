"""How the parameters of a loaded model are laid out in memory: as the checkpoint has them.

TransformerLens's shapes are mostly transposed views of a checkpoint's, and
`weight_processing/weights.py` keeps them so; what TransformerLens computes with them depends on it,
and so does its memory.
"""

from __future__ import annotations

import torch

_OF_LINEAR = {
    **dict.fromkeys(("W_Q", "W_K", "W_V", "_W_K", "_W_V"), (0, 2, 1)),
    "W_O": (2, 0, 1),
    **dict.fromkeys(("W_in", "W_gate", "W_out", "W_U"), (1, 0)),
}
"""Parameter -> its dimensions, slowest first, where the checkpoint has an nn.Linear."""

_OF_CONV1D = {**dict.fromkeys(("W_Q", "W_K", "W_V"), (1, 0, 2)), "W_U": (1, 0)}
"""Likewise, where it has transformers' Conv1D, whose weight is the other way round."""


def empty_as_loaded(
    name: str, like: torch.Tensor, architecture: str | None, device: torch.device
) -> torch.Tensor:
    """A parameter without values, laid out as loading would lay it out.

    Args:
        name: the parameter's ("blocks.3.attn.W_Q").
        like: its shape and dtype.
        architecture: `cfg.original_architecture`; None for a model that is from no checkpoint.
        device: where to make it.
    """
    orders = _OF_CONV1D if architecture == "GPT2LMHeadModel" else _OF_LINEAR
    order = orders.get(name.rpartition(".")[2]) if architecture else None
    if order is None or len(order) != like.dim():
        return torch.empty_like(like, device=device)
    stored = torch.empty([like.shape[d] for d in order], dtype=like.dtype, device=device)
    return stored.permute([order.index(d) for d in range(like.dim())])

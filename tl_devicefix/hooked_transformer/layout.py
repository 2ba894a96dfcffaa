"""How the parameters of a loaded model are laid out in memory: as the checkpoint has them.

TransformerLens's shapes are mostly transposed views of a checkpoint's, and
`weight_processing/weights.py` keeps them so; what TransformerLens computes with them depends on it,
and so does its memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformer_lens.components import TransformerBlock

from tl_devicefix.hooked_transformer.components import attention_kind

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


Convert = Callable[[torch.Tensor], torch.Tensor]


def give_buffers(model: Any) -> None:
    """Give a HookedTransformer that was constructed on meta its buffers, on the CPU.

    They are made once for all blocks of one kind of attention, which share them.
    """
    made: dict[str | None, nn.Module] = {}
    for layer, block in enumerate(model.blocks):
        kind = attention_kind(model.cfg, layer)
        if kind not in made:
            with init_empty_weights(include_buffers=False):
                made[kind] = TransformerBlock(model.cfg, layer)
        for name, module in made[kind].named_modules():
            block.get_submodule(name)._buffers.update(module._buffers)


def share_buffers(model: nn.Module) -> None:
    """Let the blocks of a model that is constructed already share their buffers."""
    shared: dict[Any, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = _shared_equal(shared, module, name, buffer)


def _shared_equal(
    shared: dict[Any, torch.Tensor], module: nn.Module, name: str, buffer: torch.Tensor | None
) -> torch.Tensor | None:
    """The buffer, or an equal one of another attention layer of the same kind."""
    kind = getattr(module, "attn_type", None)
    if buffer is None or buffer.is_meta or kind is None:
        return buffer
    key = (type(module), kind, name, buffer.shape, buffer.dtype, buffer.device)
    first = shared.setdefault(key, buffer)
    return first if first is buffer or torch.equal(first, buffer) else buffer


def converted_once(model: nn.Module, convert: Convert) -> Convert:
    """A conversion by which a buffer that several blocks share stays shared."""
    counts = Counter(
        id(buffer) for module in model.modules() for buffer in module._buffers.values()
    )
    # With the original, so that no other tensor gets its id while this is in use.
    converted: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def convert_once(tensor: torch.Tensor) -> torch.Tensor:
        if counts[id(tensor)] < 2:
            return convert(tensor)
        if id(tensor) not in converted:
            converted[id(tensor)] = tensor, convert(tensor)
        return converted[id(tensor)][1]

    return convert_once

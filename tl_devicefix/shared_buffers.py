"""Blocks on one device share the buffers that are the same for all: masks and rotary tables.

A causal mask has n_ctx^2 bytes, and TransformerLens makes one for each block.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

Convert = Callable[[torch.Tensor], torch.Tensor]


@contextlib.contextmanager
def shared_by_blocks() -> Iterator[None]:
    """Within it, blocks that are constructed share their buffers from the start."""
    known: _Known = {}
    there, thread = nn.Module.register_buffer, threading.get_ident()

    def register_buffer(
        self: nn.Module, name: str, tensor: torch.Tensor | None, persistent: bool = True
    ) -> None:
        if threading.get_ident() == thread:  # others may construct models of their own
            tensor = _known_equal(known, self, name, tensor)
        there(self, name, tensor, persistent)

    nn.Module.register_buffer = register_buffer  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_buffer = there  # type: ignore[method-assign]


def share_buffers(model: nn.Module) -> None:
    """Let the blocks of a model that is constructed already share their buffers."""
    known: _Known = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = _known_equal(known, module, name, buffer)


_Known = dict[Any, torch.Tensor]


def _known_equal(
    known: _Known, module: nn.Module, name: str, buffer: torch.Tensor | None
) -> torch.Tensor | None:
    """The buffer, or an equal one of another attention layer of the same kind."""
    kind = getattr(module, "attn_type", None)
    if buffer is None or buffer.is_meta or kind is None:
        return buffer
    key = (type(module), kind, name, buffer.shape, buffer.dtype, buffer.device)
    first = known.setdefault(key, buffer)
    return first if first is buffer or torch.equal(first, buffer) else buffer


def converted_once(model: nn.Module, convert: Convert) -> Convert:
    """`convert`, but a buffer that several blocks share is converted once, and stays shared."""
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

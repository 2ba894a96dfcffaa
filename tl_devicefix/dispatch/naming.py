"""How a tensor or module of a model is written in code: "blocks.4.mlp" -> model.blocks[4].mlp."""

from __future__ import annotations

from collections.abc import Sequence
from keyword import iskeyword


def expression(path: str) -> str:
    """The Python expression for what has this name in a model."""
    written = "model"
    for part in path.split(".") if path else ():
        if part.isdigit():
            written += f"[{part}]"
        elif iskeyword(part):  # as a Bridge's `mlp.in`
            written = f"getattr({written}, {part!r})"
        elif part.isidentifier():
            written += f".{part}"
        else:  # a key of an nn.ModuleDict
            written += f"[{part!r}]"
    return written


def joined(path: str, name: str) -> str:
    """The name of something in the module of this name."""
    return f"{path}.{name}" if path else name


def listed(names: Sequence[str], most: int = 3) -> str:
    """["W_in", "b_in"] -> "W_in, b_in"; of many, the first few."""
    if len(names) <= most + 1:
        return ", ".join(names)
    return f"{', '.join(names[:most])} and {len(names) - most} more"

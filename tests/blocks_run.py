"""How many blocks a model has run, and whether it is as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock


class Count:
    """How often any block of a model has run."""

    def __init__(self) -> None:
        self.blocks = 0


@contextlib.contextmanager
def blocks_run(model: Any) -> Iterator[Count]:
    """Counts within it; with no hook, as one changes what a sweep may skip."""
    count = Count()
    cls = type(model.blocks[0])
    own = cls.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        count.blocks += 1
        return own(self, *args, **kwargs)

    with mock.patch.object(cls, "forward", forward):
        yield count


def traces(model: Any) -> list[str]:
    """The hook points on which a hook is left, and blocks with a forward of their own."""
    points = [name for name, point in model.hook_dict.items() if point._forward_hooks]
    return points + [str(i) for i, block in enumerate(model.blocks) if "forward" in vars(block)]

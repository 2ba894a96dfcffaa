"""What caching hooks keep of a block that its rank runs whole.

A caching hook, as `run_with_cache` adds them, keeps what its hook point is given and changes
nothing: so it may be called once the block is run, and what it keeps stays with the rank.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from transformer_lens.hook_points import HookPoint

Key = str | int
"""A tensor of a block's forward: the name of an argument, or which of the block's tensors it is."""
Called = list[tuple[int, torch.Tensor]]
"""Which hook points were called, in order, and with what."""


def is_caching(hook: Any) -> bool:
    """Whether a hook of a hook point, one of PyTorch's, is TransformerLens's for a cache."""
    code = getattr(hook, "__code__", None)
    if code is None or "hook" not in code.co_freevars:
        return False
    # What TransformerLens has wrapped, here too: a `functools.partial` of its own.
    given = inspect.unwrap(hook.__closure__[code.co_freevars.index("hook")].cell_contents)
    func = getattr(given, "func", None)
    return str(getattr(func, "__module__", None)).startswith("transformer_lens.") and str(
        getattr(func, "__qualname__", None)
    ).endswith("_caching_hooks.<locals>.save_hook")


def points_of(block: nn.Module) -> list[HookPoint]:
    """The hook points of a block, of which a copy has the same in the same order."""
    return [each for each in block.modules() if type(each) is HookPoint]


@contextmanager
def noting(block: nn.Module, points: tuple[int, ...]) -> Iterator[Called]:
    """Within it, note what hook points of a copy of a block are called with, in this thread.

    Args:
        block: the copy.
        points: which of its hook points.
    """
    called: Called = []
    thread, there = threading.get_ident(), points_of(block)

    def note(index: int) -> Any:
        def hook(point: nn.Module, given: Any, output: torch.Tensor) -> None:
            if threading.get_ident() == thread:
                called.append((index, output))

        return there[index].register_forward_hook(hook)

    handles = [note(index) for index in points]
    try:
        yield called
    finally:
        for handle in handles:
            handle.remove()


class Part(NamedTuple):
    """A tensor in a storage.

    Attributes:
        of: of which: an argument of the block, one of its tensors, or, below 0, a new one.
        offset: from where that begins, of an argument or a tensor.
    """

    of: Key
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


class Layout(NamedTuple):
    """How what a block gives, and what its hook points are called with, lies in storages.

    Attributes:
        nbytes: of each new storage: of -1, -2, ...
        parts: of which the first is what the block gives.
        points: which hook point is called with each of the others.
    """

    nbytes: tuple[int, ...]
    parts: tuple[Part, ...]
    points: tuple[int, ...]


def layout_of(output: torch.Tensor, called: Called, known: dict[Key, torch.Tensor]) -> Layout:
    """The layout of what a block has given, of which some may lie in what is known.

    Args:
        output: what it gave.
        called: what its hook points were called with.
        known: its arguments and tensors.

    Raises:
        RuntimeError: if something that is known is seen as of another dtype.
    """
    made = [output, *(each for _, each in called)]
    of: dict[int, Key] = {each.untyped_storage()._cdata: key for key, each in known.items()}
    nbytes, parts = [], []
    for each in made:
        storage = each.untyped_storage()
        if storage._cdata not in of:
            nbytes.append(storage.nbytes())
            of[storage._cdata] = -len(nbytes)
        key = of[storage._cdata]
        offset = int(each.storage_offset())
        if key in known:
            offset -= int(known[key].storage_offset())
            if each.dtype != known[key].dtype:
                raise RuntimeError(f"{key} is read as {each.dtype}")
        parts.append(Part(key, tuple(each.shape), each.stride(), offset, each.dtype))
    return Layout(tuple(nbytes), tuple(parts), tuple(index for index, _ in called))


def storages_of(layout: Layout, made: list[torch.Tensor]) -> list[torch.UntypedStorage]:
    """The new storages of a layout, with what was made, which may have come to lie otherwise."""
    found = []
    for number, nbytes in enumerate(layout.nbytes, 1):
        within = [(part, each) for part, each in zip(layout.parts, made) if part.of == -number]
        storage = within[0][1].untyped_storage()
        if storage.nbytes() != nbytes or not all(_lies(*each, storage) for each in within):
            device = within[0][1].device
            storage = torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()
            for part, each in within:
                tensor_in(storage, part).copy_(each)
        found.append(storage)
    return found


def _lies(part: Part, made: torch.Tensor, storage: torch.UntypedStorage) -> bool:
    return (
        made.untyped_storage()._cdata == storage._cdata
        and made.stride() == part.stride
        and made.storage_offset() == part.offset
    )


def tensor_in(storage: torch.UntypedStorage, lying: Any) -> torch.Tensor:
    """A tensor in a storage of any device.

    Args:
        storage: all of it.
        lying: how it lies there: `dtype`, `offset`, `shape` and `stride`.
    """
    tensor = torch.empty(0, dtype=lying.dtype, device=storage.device)
    return tensor.set_(storage, lying.offset, lying.shape, lying.stride)  # type: ignore[call-overload]

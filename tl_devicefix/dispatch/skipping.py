"""Blocks that a forward skips, as another has computed already what they return.

All else is as ever: tokens are embedded, masks and positions are made, and the first block that is
not skipped gets the residual stream as if those below it had run. TransformerLens's own
`start_at_layer` is not used: a Bridge's runs the blocks below all the same, and a
HookedTransformer's wants the masks made by hand.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from tl_devicefix.monkeypatch.replacing import AroundForward

# The first block that the forward of this thread runs.
_first: ContextVar[int] = ContextVar("first", default=0)


def first_block() -> int:
    """The index of the first block that is not skipped."""
    return _first.get()


def is_skipped(block: nn.Module) -> bool:
    """Whether a block is being skipped: nothing needs to be brought to it."""
    return _Skipped.of(block) is not None


@contextlib.contextmanager
def skipping(blocks: Sequence[nn.Module], first: int, output: Any) -> Iterator[None]:
    """Within it, a forward begins at block `first` of `blocks`.

    Args:
        blocks: all of the model's.
        first: 0 skips none; the number of blocks skips all.
        output: what the block before has returned, in whatever form it does; left as it is.
    """
    token = _first.set(first)
    try:
        with contextlib.ExitStack() as stack:
            for block in blocks[:first]:
                stack.enter_context(_put(_Skipped(block, output, block is blocks[first - 1])))
            yield
    finally:
        _first.reset(token)


def output_of(block: nn.Module, run: Callable[[], Any]) -> Any:
    """What a block returns in a forward, which ends there.

    Args:
        block: a block that the forward runs; nobody may have a hook on it.
        run: calls the forward.
    """
    kept = _Kept(block)
    with _put(kept), contextlib.suppress(_Reached):
        run()
    return kept.output


class _Reached(Exception):
    """A forward has come as far as it was wanted."""


class _Kept(AroundForward):
    """Keeps what a block returns, and ends the forward."""

    output: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.output = self.run(*args, **kwargs)
        raise _Reached


class _Skipped(AroundForward):
    """Returns what a block that is skipped would.

    Args:
        block: the block.
        output: what is returned.
        is_last: whether a block that is not skipped comes next, which gets a copy: hooks may
            change it in place.
    """

    def __init__(self, block: nn.Module, output: Any, is_last: bool) -> None:
        super().__init__(block)
        self._output = output
        self._is_last = is_last

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return copied(self._output) if self._is_last else self._output


def copied(output: Any) -> Any:
    """What a block returns, with a residual stream of its own: a tensor, or a tuple's first."""
    if isinstance(output, torch.Tensor):
        return output.clone()
    return type(output)((output[0].clone(), *output[1:]))


@contextlib.contextmanager
def _put(around: AroundForward) -> Iterator[None]:
    """Within it, this is around its module's forward; the module's hooks run as ever."""
    around.put()
    try:
        yield
    finally:
        around.take_off()

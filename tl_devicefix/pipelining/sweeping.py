"""Runs of one model on the same tokens, each with hooks of its own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

from tl_devicefix.dispatch.skipping import skipping
from tl_devicefix.pipelining.first_block import FirstBlock, Hooks
from tl_devicefix.pipelining.pipeline_map import pipeline_map
from tl_devicefix.pipelining.residual_streams import ResidualStreams

_one_by_one: ContextVar[bool] = ContextVar("sequential", default=False)


@contextlib.contextmanager
def sequential() -> Iterator[None]:
    """Run sweeps as plain loops within a `with` block: one run at a time, from the first block on.

    `transformer_lens.patching` then runs TransformerLens's own loops. The environment variable
    `TL_DEVICEFIX_SEQUENTIAL=1` does it everywhere.

    Yields:
        Nothing.
    """
    token = _one_by_one.set(True)
    try:
        yield
    finally:
        _one_by_one.reset(token)


def is_one_by_one() -> bool:
    """Whether sweeps are to be nothing but loops."""
    return _one_by_one.get() or os.environ.get("TL_DEVICEFIX_SEQUENTIAL", "0") not in ("", "0")


def sweep(model: Any, tokens: Any, runs: Iterable[Hooks], **arguments: Any) -> Iterator[Any]:
    """Yield `model.run_with_hooks(tokens, fwd_hooks=run, **arguments)` for each run, in order.

        runs = ([(f"blocks.{layer}.hook_resid_pre", ablate)] for layer in range(80))
        for logits in tl_devicefix.sweep(model, tokens, runs):
            ...

    The results are the same, bit for bit, and it is quicker: each run starts at the first block
    that its hooks change, from the residual stream of the unpatched run, and on several devices
    several runs are in flight. Over all layers, half of the blocks are run. A run starts no later
    than at a block on which someone else has a hook (permanent or not, PyTorch's too), or in which
    is a module that is not TransformerLens's, such as an SAE; and at the first block if there is
    one on the embedding, if autograd is on and a parameter that would be passed by needs a gradient
    (so use `torch.no_grad()`), if a KV cache or another argument that a run changes is passed on,
    and for Bridges in training mode or of an architecture that is not known to hand the residual
    stream alone from block to block.

    Args:
        model: a HookedTransformer or a TransformerBridge.
        tokens: as its `run_with_hooks` takes them. They, the weights and the hooks on the model may
            not change until the last run has ended.
        runs: lists of (name, hook), read no further than needed.
        arguments: of the forward: `return_type`, `stop_at_layer`, `attention_mask`...

    Yields:
        What `run_with_hooks` returns for each run: by default logits `[batch, pos, d_vocab]`.

    Raises:
        TypeError: for an argument that would leave hooks behind.
    """
    for name in ("fwd_hooks", "bwd_hooks", "reset_hooks_end"):
        if name in arguments:
            raise TypeError(
                f"sweep() takes no {name}, as the hooks of a run are on the model during that run "
                "only: pass forward hooks in `runs`, and call run_with_hooks for others"
            )
    if is_one_by_one():
        return (model.run_with_hooks(tokens, fwd_hooks=run, **arguments) for run in runs)

    first_block = FirstBlock(model, tokens, arguments)
    # The view is restored after a run: to go through all hook points for that is not needed.
    how = {**arguments, "reset_hooks_end": False} if first_block.is_known else arguments

    def run_one(view: Any, run: _Run) -> Any:
        with skipping(getattr(view, "blocks", ()), run.first, run.residual_stream):
            return view.run_with_hooks(tokens, fwd_hooks=run.hooks, **how)

    streams = ResidualStreams(model, tokens, arguments)
    return pipeline_map(model, run_one, _starts(first_block, streams, runs))


class _Run(NamedTuple):
    hooks: Hooks
    first: int
    """The first block that is run."""
    residual_stream: Any
    """What it starts from, as the block before has returned it."""


def _starts(
    first_block: FirstBlock, streams: ResidualStreams, runs: Iterable[Hooks]
) -> Iterator[_Run]:
    for run in runs:
        hooks = list(run)
        first = first_block.of(hooks)
        yield _Run(hooks, first, streams.before(first) if first else None)

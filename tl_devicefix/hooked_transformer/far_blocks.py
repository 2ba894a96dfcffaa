"""Blocks of other hosts that nobody listens in: their rank runs each by one command."""

from __future__ import annotations

import logging
from typing import Any

import torch

from tl_devicefix.attention.implementation import is_sdpa
from tl_devicefix.hooked_transformer.known_blocks import Look, fits, why_attention_as_installed
from tl_devicefix.monkeypatch.exchanged import exchanged_functions

_log = logging.getLogger(__name__)
_warned_of: set[tuple[str, ...]] = set()


def run_on_its_rank(
    block: Any,
    resid_pre: torch.Tensor,
    shortformer_pos_embed: torch.Tensor | None,
    entry: Any,
    attention_mask: torch.Tensor | None,
    look: Look,
) -> torch.Tensor | None:
    """Run a block by one command; None if it has to run operation by operation.

    Args:
        block: one that runs the plain function.
        resid_pre: of its forward, as the other arguments.
        shortformer_pos_embed: likewise.
        entry: likewise.
        attention_mask: likewise.
        look: at the block just now.
    """
    allocation = getattr(resid_pre, "_allocation", None)
    run = None if allocation is None else getattr(allocation.machine.executor, "run_block", None)
    attn = block.attn
    if (
        run is None
        or look.is_heard()
        or why_attention_as_installed(attn, look) is not None
        or attn.cfg.positional_embedding_type == "alibi"  # which leaves something in its module
        or (entry is not None and is_sdpa(attn))  # as this cache grows in place
        or not fits(attn, (resid_pre,) * 3, entry)
        or _are_functions_exchanged()
    ):
        return None
    inputs = {
        "resid_pre": resid_pre,
        "shortformer_pos_embed": shortformer_pos_embed,
        "attention_mask": attention_mask,
    }
    return run(block, inputs, entry, look)  # type: ignore[no-any-return]


def _are_functions_exchanged() -> bool:
    """Whether a block would use functions that its rank lacks; warns once if so."""
    names = exchanged_functions()
    if names and names not in _warned_of:
        _warned_of.add(names)
        more = f" (and {len(names) - 1} more)" if names[1:] else ""
        _log.warning(
            f"{names[0]}{more} was replaced on this rank, but not on the others: until you put it "
            "back, blocks run operation by operation, which takes longer"
        )
    return bool(names)

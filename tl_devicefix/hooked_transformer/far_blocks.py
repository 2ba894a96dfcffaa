"""Blocks, and components of blocks, that nobody listens in: their rank runs each by one command."""

from __future__ import annotations

import logging
from typing import Any

import torch

from tl_devicefix.attention.implementation import is_sdpa
from tl_devicefix.hooked_transformer.known_blocks import (
    Look,
    fits,
    look_at,
    why_as_installed,
    why_attention_as_installed,
)
from tl_devicefix.monkeypatch.exchanged import exchanged_functions

_log = logging.getLogger(__name__)
_warned_of: set[tuple[str, ...]] = set()


def _run(module: Any, inputs: dict[str, Any], entry: Any = None) -> torch.Tensor | None:
    """Run a module by one command; None if it has to run operation by operation."""
    hosts = next(iter(inputs.values()))._allocation.machine.executor
    run = getattr(hosts, "run_module", None)
    return None if run is None or _are_functions_exchanged() else run(module, inputs, entry)


def _are_functions_exchanged() -> bool:
    """Whether a block would use functions that its rank lacks; warns once if so."""
    names = exchanged_functions()
    if names and names not in _warned_of:
        _warned_of.add(names)
        more = f" (and {len(names) - 1} more)" if names[1:] else ""
        _log.warning(
            f"{names[0]}{more} was replaced on this rank, but not on the others: until it is put "
            "back, blocks run operation by operation, which takes longer"
        )
    return bool(names)


def block_whole(
    block: Any,
    resid_pre: torch.Tensor,
    shortformer_pos_embed: torch.Tensor | None,
    entry: Any,
    attention_mask: torch.Tensor | None,
    look: Look,
) -> torch.Tensor | None:
    """Run a block on the rank that has it; None if somebody looks into it."""
    if (
        look.is_heard()
        or why_as_installed(block, look) is not None
        or why_attention_as_installed(block.attn, look) is not None
        or not _may_be_whole(block.attn, (resid_pre,) * 3, entry)
    ):
        return None
    inputs = {
        "resid_pre": resid_pre,
        "shortformer_pos_embed": shortformer_pos_embed,
        "attention_mask": attention_mask,
    }
    return _run(block, inputs, entry)


def _may_be_whole(attn: Any, inputs: Any, entry: Any) -> bool:
    """Whether attention leaves nothing in its module, and no cache grows in place, here."""
    return (
        attn.cfg.positional_embedding_type != "alibi"
        and (entry is None or not is_sdpa(attn))
        and fits(attn, inputs, entry)
    )


def attention_whole(
    attn: Any,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    entry: Any,
    attention_mask: torch.Tensor | None,
) -> torch.Tensor | None:
    """Run attention on the rank that has it; None if somebody looks into it."""
    if not _may_be_whole(attn, inputs, entry):
        return None
    look_at(attn)  # which leaves something in it, as a forward does
    names = "query_input", "key_input", "value_input"
    return _run(attn, {**dict(zip(names, inputs)), "attention_mask": attention_mask}, entry)


def component_whole(component: Any, x: torch.Tensor, is_norm: bool = False) -> torch.Tensor | None:
    """Run an MLP or a norm on the rank that has it; None if somebody looks into it.

    A norm reads the residual stream several times, as others do beside it. Their gradients are
    added one by one, and rounded each time: so it is not run by one command then.
    """
    if x.dim() != 3 or (is_norm and torch.is_grad_enabled() and x.requires_grad):
        return None  # with heads, or added to
    return _run(component, {"x": x})

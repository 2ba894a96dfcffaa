"""`TransformerBridge.forward`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tl_devicefix.attention.implementation import is_sdpa
from tl_devicefix.dispatch import forward as running
from tl_devicefix.simulation.tensor import has_values
from tl_devicefix.transformer_bridge.sdpa import let_masks_be_for_sdpa
from tl_devicefix.transformer_bridge.this_forward import ThisForward, within


def forward(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """`TransformerBridge.forward`, whose results are at home.

    Raises:
        RuntimeError: if the model's weights are only partly processed.
    """
    now = ThisForward()
    # Of masks of its own shape a Bridge reads what transformers would add to the scores.
    if all(_is_of_tokens(each) for each in _masks_in(args, kwargs)):
        by_sdpa = is_sdpa(self) and let_masks_be_for_sdpa(self)
        now = ThisForward(True, _may_pad(args, kwargs), by_sdpa)
    with within(now):
        return running.forward(original, self, *args, **kwargs)


def _may_pad(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether there may be tokens that others do not see."""
    tokens = args[0] if args else kwargs.get("input")
    masks = _masks_in((), kwargs)
    return len(args) > 2 or isinstance(tokens, list) or any(map(_masks, masks))


def _masks_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """What may be a mask among the arguments of `TransformerBridge.forward`."""
    named = [kwargs.get(name) for name in ("attention_mask", "one_zero_attention_mask")]
    return named + [each for each in args[1:] if isinstance(each, torch.Tensor)]


def _is_of_tokens(mask: Any) -> bool:
    return (
        mask is None
        or not isinstance(mask, (torch.Tensor, Mapping))
        or (isinstance(mask, torch.Tensor) and mask.dim() <= 2)
    )


def _masks(mask: Any) -> bool:
    """Whether a mask may leave out any token; that of `generate` does not, for one prompt."""
    if isinstance(mask, torch.Tensor) and mask.dim() == 2 and has_values(mask):
        return not bool(mask.all())
    return mask is not None

"""`TransformerBridge.forward`, and the methods of a Bridge that call the tokenizer."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from tl_devicefix.attention.implementation import is_sdpa
from tl_devicefix.attention.one_forward import FACTS, kept_in_forward, one_forward
from tl_devicefix.dispatch import forward as running
from tl_devicefix.dispatch.scheduler import refuse_in_run, take_own_tokenizer
from tl_devicefix.monkeypatch.patch import patches
from tl_devicefix.multihost.remote_block import together
from tl_devicefix.placement.devices import has_values
from tl_devicefix.transformer_bridge.attention import ThisForward, makes_masks
from tl_devicefix.transformer_bridge.block import prepare


@patches("TransformerBridge", takes="self input return_type", why="what leaves it is at home")
def forward(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """`TransformerBridge.forward`, whose results are at home.

    Raises:
        RuntimeError: if the model's weights are only partly processed.
    """
    if "past_key_values" in kwargs and _takes_cache(self):
        kwargs["cache"] = kwargs.pop("past_key_values")
    now = ThisForward()
    named = [kwargs.get(name) for name in ("attention_mask", "one_zero_attention_mask")]
    masks = named + [value for value in args[1:] if isinstance(value, torch.Tensor)]
    # Of masks of its own shape a Bridge reads what transformers would add to the scores.
    if all(map(_is_of_tokens, masks)):
        tokens = args[0] if args else kwargs.get("input")
        may_pad = len(args) > 2 or isinstance(tokens, list) or any(map(_leaves_out, masks))
        config = prepare(self)
        by_sdpa = config is not None and is_sdpa(self) and makes_masks()
        now = ThisForward(True, may_pad, config if by_sdpa else None)
    with one_forward(now), together():
        kept_in_forward()[FACTS] = [now.is_of_bridge, now.may_pad, now.config_of_sdpa is not None]
        return running.forward(original, self, *args, **kwargs)


def _takes_cache(bridge: Any) -> bool:
    """Whether a state has transformers 5.24's name, where `generate` knows two earlier ones."""
    is_stateful = getattr(bridge.cfg, "is_stateful", False)
    return (
        bool(is_stateful) and "cache" in inspect.signature(bridge.original_model.forward).parameters
    )


def _is_of_tokens(mask: Any) -> bool:
    """Whether a mask says which tokens are seen, and not by which others."""
    if isinstance(mask, torch.Tensor):
        return mask.dim() <= 2
    return not isinstance(mask, Mapping)


def _leaves_out(mask: Any) -> bool:
    """Whether a mask may leave out any token; that of `generate` does not, for one prompt."""
    if isinstance(mask, torch.Tensor) and mask.dim() == 2 and has_values(mask):
        return not bool(mask.all())
    return mask is not None


@patches(
    "TransformerBridge",
    *("generate", "generate_stream"),
    takes="self input",
    why="runs in flight do not change what others read",
)
def with_own_tokenizer(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """A method of a Bridge that changes the tokenizer's padding side while it runs."""
    refuse_in_run(self)
    take_own_tokenizer(self)
    return original(self, *args, **kwargs)

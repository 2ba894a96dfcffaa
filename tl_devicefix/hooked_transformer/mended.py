"""Faults of a HookedTransformer's own methods that are mended here, because each is one place.

`docs/compatibility.md` lists the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from transformer_lens import HookedTransformer

from tl_devicefix.monkeypatch.patch import patches

Original = Callable[..., Any]


@patches(
    "AbstractAttention",
    takes="n_heads device",
    why="BLOOM's slopes where the heads are no power of two",
    until="3",
)
def create_alibi_multipliers(
    original: Original, n_heads: int, device: torch.device | str | None = None
) -> Float[torch.Tensor, " n_heads"]:
    """Wrap `AbstractAttention.create_alibi_multipliers`, for any number of heads.

    TransformerLens's formula is right for powers of two only.
    """
    # As published and as in transformers: the slopes for the power of two below, and then every
    # other slope for the power of two above. 12 heads have the slopes of 8, and 4 of those of 16.
    power = 2 ** math.floor(math.log2(n_heads))
    further = original(2 * power, device)[: 2 * (n_heads - power) : 2]  # [n_heads - power]
    return torch.cat([original(power, device), further])  # [n_heads]


@patches(
    "HookedTransformer",
    takes="self input return_type",
    why="texts of unequal length are generated one by one, because padding would be attended to",
    until="3.0",
)
def generate(
    original: Original, self: HookedTransformer, input: object = "", *args: object, **kwargs: Any
) -> object:
    """Wrap `HookedTransformer.generate`, and generate texts of unequal length one by one.

    Tokens that you padded yourself go to TransformerLens's own method.
    """
    # TransformerLens 2 and 3.0 drop the mask of padding, so only the longest text would be right.
    if isinstance(input, list) and kwargs.get("return_type", "input") in ("input", "str"):
        prepends = {name: kwargs[name] for name in ("prepend_bos",) if name in kwargs}
        lengths = {self.to_tokens(text, **prepends).shape[1] for text in input}
        if len(lengths) > 1:
            return [original(self, text, *args, **kwargs) for text in input]
    return original(self, input, *args, **kwargs)

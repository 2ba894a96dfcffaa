"""Faults of a HookedTransformer's own methods that are mended here, because each is one place.

`docs/compatibility.md` lists the others.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float

from tl_devicefix.monkeypatch.patch import patches


@patches(
    "AbstractAttention",
    takes="n_heads device",
    why="BLOOM's slopes where the heads are no power of two",
    until="3",
)
def create_alibi_multipliers(
    original: Any, n_heads: int, device: torch.device | str | None = None
) -> Float[torch.Tensor, " n_heads"]:
    """Wrap `AbstractAttention.create_alibi_multipliers`, for any number of heads.

    TransformerLens's formula is right for powers of two only. For other numbers, ALiBi as published
    and as in transformers takes the slopes for the power of two below, and then every other slope
    for the power of two above.
    """
    power = 2 ** math.floor(math.log2(n_heads))
    further: torch.Tensor = original(2 * power, device)[: 2 * (n_heads - power) : 2]
    return torch.cat([original(power, device), further])


@patches(
    "HookedTransformer",
    takes="self input return_type",
    why="texts of unequal length are generated one by one, because padding would be attended to",
    until="3.0",
)
def generate(original: Any, self: Any, input: Any = "", *args: Any, **kwargs: Any) -> Any:
    """Wrap `HookedTransformer.generate`: texts of unequal length are generated one by one.

    TransformerLens 2 and 3.0 drop the mask of padding here, so that only the longest text's result
    is right. Tokens that you padded yourself go to TransformerLens's own method.
    """
    wants_text = kwargs.get("return_type", "input") in ("input", "str")
    if isinstance(input, list) and wants_text:
        prepends = {name: kwargs[name] for name in ("prepend_bos",) if name in kwargs}
        lengths = {self.to_tokens(text, **prepends).shape[1] for text in input}
        if len(lengths) > 1:
            return [original(self, text, *args, **kwargs) for text in input]
    return original(self, input, *args, **kwargs)

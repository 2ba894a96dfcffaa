"""Where the installed TransformerLens processes weights differently from other versions.

Parity is with the version that is installed, so the folding steps take these differences as data.
"""

from __future__ import annotations

import importlib.util
import inspect
from dataclasses import dataclass
from functools import cache
from typing import Any


@dataclass(frozen=True)
class Conventions:
    """How one TransformerLens version processes weights."""

    folds_moe: bool
    """Whether norms fold into mixture-of-experts blocks (not in 2.x, nor in some 3.x)."""
    recenters_b_O: bool
    """Whether b_O is centred again after the value biases are folded into it (3.x)."""
    keeps_folded_norms: bool
    """Whether a processed state dict keeps the folded norms as identities (3.x) or drops them."""


@cache
def installed_conventions() -> Conventions:
    """The conventions of the TransformerLens that is installed."""
    from transformer_lens import HookedTransformer

    is_3x = importlib.util.find_spec("transformer_lens.weight_processing") is not None
    # Folding of MoE came with 3.0, went, and came back; only this warning tells which it is.
    loader = inspect.getsource(_original(HookedTransformer, "load_and_process_state_dict"))
    refuses_moe = "You are using MoE, so the layer norm weights can't be folded" in loader
    return Conventions(folds_moe=not refuses_moe, recenters_b_O=is_3x, keeps_folded_norms=is_3x)


def _original(cls: type, name: str) -> Any:
    from tl_devicefix.patches import original

    return original(cls, name)

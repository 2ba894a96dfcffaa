"""How one TransformerLens version processes weights: data that the folding steps take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Conventions:
    """How one TransformerLens version processes weights."""

    folds_moe: bool
    """Whether norms fold into mixture-of-experts blocks (not in 2.x, nor in some 3.x)."""
    recenters_b_O: bool
    """Whether b_O is centred again after the value biases are folded into it (3.x)."""
    keeps_folded_norms: bool
    """Whether a processed state dict keeps the folded norms as identities (3.x) or drops them."""

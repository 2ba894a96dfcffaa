"""Names for the types of TransformerLens's objects, for type checkers.

An installed TransformerLens may lack one of the two classes, so nothing is imported at run time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from torch import nn

if TYPE_CHECKING:
    from transformer_lens import HookedTransformer
    from transformer_lens.model_bridge import TransformerBridge

    Model: TypeAlias = HookedTransformer | TransformerBridge
else:
    Model = nn.Module

__all__ = ["Model"]

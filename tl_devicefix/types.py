"""Names for the types of TransformerLens's objects, for type checkers.

An installed TransformerLens may lack one of the two classes, so nothing is imported at run time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from torch import nn

if TYPE_CHECKING:
    from transformer_lens import HookedTransformer, HookedTransformerConfig
    from transformer_lens.config import TransformerBridgeConfig
    from transformer_lens.model_bridge import TransformerBridge

    Model: TypeAlias = HookedTransformer | TransformerBridge
    Config: TypeAlias = HookedTransformerConfig | TransformerBridgeConfig
else:
    Model, Config = nn.Module, object

__all__ = ["Config", "Model"]

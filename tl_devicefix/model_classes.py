"""The classes of models that the installed TransformerLens has."""

from __future__ import annotations

from typing import Any

from tl_devicefix.versions import has_bridge, has_hooked_transformer


def is_hooked_transformer(model: Any) -> bool:
    """Whether this is a HookedTransformer."""
    if not has_hooked_transformer():
        return False
    from transformer_lens import HookedTransformer

    return isinstance(model, HookedTransformer)


def is_bridge(model: Any) -> bool:
    """Whether this is a TransformerBridge."""
    if not has_bridge():
        return False
    from transformer_lens.model_bridge import TransformerBridge

    return isinstance(model, TransformerBridge)


def class_names() -> str:
    """The classes that models may be of, for a sentence."""
    names = [(has_hooked_transformer(), "HookedTransformer"), (has_bridge(), "TransformerBridge")]
    return " or a ".join(name for there, name in names if there)

"""Views of a Bridge."""

from __future__ import annotations

from typing import Any

from transformer_lens.model_bridge.generalized_components import position_embeddings_attention

from tl_devicefix.dispatch import views
from tl_devicefix.dispatch.twins import Twins
from tl_devicefix.transformer_bridge.block import prepare


def view_of(bridge: Any) -> Any:
    """A view of a Bridge: see `dispatch/views.py:view_of`."""
    prepare(bridge)
    twins = Twins()
    view = views.view_of(bridge, twins)
    _register_attention(bridge, twins)
    return view


def _register_attention(bridge: Any, twins: Twins) -> None:
    """Let TransformerLens 3 find the components of the view's attention layers.

    It calls the hooks after the rotary embedding by a registry of which component wraps a layer.
    """
    registry = getattr(position_embeddings_attention, "_ATTENTION_BRIDGE_REGISTRY", None)
    if registry is None:
        return
    for module in bridge.modules():
        component = registry.get(id(module))
        if component is not None:
            registry[id(twins.known(module))] = twins.known(component)

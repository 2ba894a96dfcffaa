"""A view of a Bridge, as far as it differs from a HookedTransformer's."""

from __future__ import annotations

from typing import Any

import pytest
from transformer_lens.model_bridge.generalized_components import position_embeddings_attention

from tl_devicefix.transformer_bridge.alignment import view_of


def test_transformer_lens_3_finds_a_view_s_attention_by_what_it_wraps(boot: Any) -> None:
    registry = getattr(position_embeddings_attention, "_ATTENTION_BRIDGE_REGISTRY", None)
    if registry is None:
        pytest.skip("TransformerLens 4 needs no registry")
    bridge = boot("llama", device="cpu")

    view = view_of(bridge)

    for model in (bridge, view):
        for block in model.blocks:
            assert registry[id(block.attn.original_component)] is block.attn

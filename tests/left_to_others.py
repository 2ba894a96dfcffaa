"""What the default run on one TransformerLens version leaves to that on another.

The newest HookedTransformer is in TransformerLens 3, the newest Bridge in 4. There, all of each is
tested; elsewhere, what depends on TransformerLens. `pytest --full` leaves nothing out.
"""

from __future__ import annotations

import pytest
from either_class import BRIDGE

from tl_devicefix.monkeypatch.versions import has_hooked_transformer, installed

OF_FILES = ("test_saved_activations_resumed", "test_load_activations", "test_token_batches")
"""Saved activations, whichever model they are of."""
OF_RANKS = ("test_errors_on_ranks", "test_lost_ranks", "test_devices_of_a_host", "test_signing")
BRIDGE_ON_3 = ("test_parity",)
"""Where the Bridge of TransformerLens 3.9 is tested: whether it gives what it gave unpatched."""


def is_left_to_others(item: pytest.Item) -> bool:
    """Whether another version's default run has this test, of the same code."""
    if has_hooked_transformer() and _is_of_bridge(item):
        return item.path.stem not in BRIDGE_ON_3
    # Simulated devices, how ranks fail, and files know nothing of TransformerLens.
    is_of_torch = item.path.parent.name == "simulation" or item.path.stem in (*OF_RANKS, *OF_FILES)
    return installed().major != 3 and is_of_torch


def _is_of_bridge(item: pytest.Item) -> bool:
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    in_files = item.path.parent.name == "transformer_bridge" or "bridge" in item.path.stem
    return in_files or parameters.get("cls") == BRIDGE

"""The two classes of models, and which of them the installed TransformerLens has.

A file of tests of one class imports it from here, and is skipped where it is missing.
"""

from __future__ import annotations

from typing import Any

import pytest
from packaging.version import Version

from tl_devicefix.monkeypatch.versions import has_bridge, has_hooked_transformer, installed

HOOKED, BRIDGE = "hooked", "bridge"
CLASSES = [*([HOOKED] if has_hooked_transformer() else []), *([BRIDGE] if has_bridge() else [])]
"""The ids of the classes that the installed TransformerLens has."""
FUSES_SINCE = {HOOKED: Version("3.8"), BRIDGE: Version("4.0")}
"""Class -> the first TransformerLens version with blocks that can be fused."""

if has_hooked_transformer():
    from transformer_lens import HookedTransformer
if has_bridge():
    from transformer_lens.model_bridge import TransformerBridge


def load_of(model_class: str = CLASSES[0]) -> Any:
    """Return what loads a model of a class: by default a HookedTransformer's, if there are any."""
    if model_class == HOOKED:
        return HookedTransformer.from_pretrained
    return TransformerBridge.boot_transformers


def __getattr__(name: str) -> Any:
    if name in ("HookedTransformer", "TransformerBridge"):
        reason = f"transformer_lens {installed()} has no {name}"
        pytest.skip(reason, allow_module_level=True)
    raise AttributeError(name)

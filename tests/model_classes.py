"""The ids of the two classes of models that tests are parametrised over."""

from __future__ import annotations

from tl_devicefix.monkeypatch.versions import has_bridge, has_hooked_transformer

HOOKED, BRIDGE = "hooked", "bridge"
CLASSES = [*([HOOKED] if has_hooked_transformer() else []), *([BRIDGE] if has_bridge() else [])]
"""Those of the installed TransformerLens."""

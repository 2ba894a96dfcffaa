"""Models of which some blocks live in host memory."""

from __future__ import annotations

import pytest
from either_class import cls  # noqa: F401

from tl_devicefix.monkeypatch.versions import has_bridge, has_hooked_transformer

if has_bridge():
    from bridges import boot  # noqa: F401
    from bridges import references as bridge_references  # noqa: F401

if has_hooked_transformer():
    from offloaded_models import load, model, models, offload  # noqa: F401
    from spread_models import (  # noqa: F401
        from_pretrained,
        kind,
        machine,
        on_cpu,
        reference,
        simulated,
        toys,
    )
else:
    from machines import machine  # noqa: F401

    @pytest.fixture
    def kind() -> str:
        """Which architecture the model has; parametrise it for others."""
        return "llama"

"""Models of which some blocks live in host memory."""

from __future__ import annotations

from tl_devicefix.patching.versions import has_hooked_transformer

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

"""Models over the devices of a machine that is open for a whole module."""

from __future__ import annotations

from tl_devicefix.patching.versions import has_hooked_transformer

if has_hooked_transformer():
    from spread_models import (  # noqa: F401
        from_pretrained,
        kind,
        load,
        machine,
        mask,
        model,
        models,
        on_cpu,
        other_tokens,
        reference,
        simulated,
        spread,
        toys,
    )

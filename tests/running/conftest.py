"""Models over the devices of a machine that is open for a whole module."""

from __future__ import annotations

from either_class import cls, folded, folded_on_one, on_one, over_devices  # noqa: F401

from tl_devicefix.patching.versions import has_bridge, has_hooked_transformer

if has_bridge():
    from bridges import boot, dispatched  # noqa: F401
    from bridges import references as bridge_references  # noqa: F401

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
else:
    from machines import machine  # noqa: F401

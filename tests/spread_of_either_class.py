# ruff: noqa: F401
"""Fixtures of either class's models over the devices of a machine that a whole module shares.

A room's conftest imports all of it.
"""

from __future__ import annotations

from either_class import (
    at_home,
    cls,
    folded,
    folded_on_one,
    from_checkpoint,
    kind,
    on_one,
    over_devices,
)

from tl_devicefix.monkeypatch.versions import has_bridge, has_hooked_transformer

if has_bridge():
    from bridges import boot, dispatched
    from bridges import references as bridge_references

if has_hooked_transformer():
    from spread_models import (
        load,
        machine,
        mask,
        model,
        models,
        on_cpu,
        other_tokens,
        reference,
        spread,
        toys,
        transfers_of,
    )

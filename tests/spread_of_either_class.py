# ruff: noqa: F401, F403
"""Fixtures of either class's models over the devices of a machine that a whole module shares.

A room's conftest imports all of it.
"""

from __future__ import annotations

from either_class import *

from tl_devicefix.monkeypatch.versions import has_bridge, has_hooked_transformer

if has_bridge():
    from bridges import boot, dispatched
    from bridges import references as bridge_references

if has_hooked_transformer():
    from spread_models import *

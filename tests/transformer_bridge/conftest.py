"""Bridges over simulated devices."""

from __future__ import annotations

import pytest

from tl_devicefix.monkeypatch.versions import has_bridge

if not has_bridge():
    collect_ignore_glob = ["*"]


@pytest.fixture(scope="session")
def references(bridge_references):
    return bridge_references

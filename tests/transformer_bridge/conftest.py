"""Bridges over simulated devices."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def references(bridge_references):
    return bridge_references

"""Models with offloaded blocks."""

import pytest


@pytest.fixture
def spread():
    """The key of `OFFLOADED` that says how `model` is placed; parametrise it for others."""
    return "some of one device"

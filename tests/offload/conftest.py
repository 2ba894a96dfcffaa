"""Models of which some blocks live in host memory."""

import pytest


@pytest.fixture
def spread():
    """Which of `OFFLOADED` the model is; parametrise it for others."""
    return "some of one device"

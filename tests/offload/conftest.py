"""Models of which some blocks live in host memory."""

import pytest


@pytest.fixture(scope="module")
def machine(simulated):
    with simulated(4) as machine:
        yield machine


@pytest.fixture
def spread():
    """Which of `OFFLOADED` the model is; parametrise it for others."""
    return "some of one device"

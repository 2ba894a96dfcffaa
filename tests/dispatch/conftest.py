"""One machine for the tests of a module, so that they share models."""

import pytest


@pytest.fixture(scope="module")
def machine(simulated):
    with simulated(4) as machine:
        yield machine

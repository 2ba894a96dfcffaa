"""The public calls of a class run where the installed TransformerLens has it."""

import pytest


@pytest.fixture(scope="module")
def machine(simulated):
    with simulated(4) as machine:
        yield machine

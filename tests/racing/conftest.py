"""Models over devices that run behind the host, open for a whole module."""

import pytest

from racing import asynchronous


@pytest.fixture(scope="module")
def machine():
    with asynchronous(4) as machine:
        yield machine

"""One machine for the tests of a module, so that they share models."""

import pytest

from tl_devicefix.monkeypatch.versions import has_hooked_transformer

if not has_hooked_transformer():
    collect_ignore = ["test_gathering.py"]


@pytest.fixture(scope="module")
def machine(simulated):
    with simulated(4) as machine:
        yield machine

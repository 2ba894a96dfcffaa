"""One machine for the tests of a module, so that they share models."""

import pytest

from tl_devicefix.monkeypatch.versions import has_hooked_transformer

if not has_hooked_transformer():
    collect_ignore = [
        "test_attached.py",
        "test_forward.py",
        "test_hooks.py",
        "test_mixing.py",
        "test_moving.py",
        "test_transfers.py",
    ]


@pytest.fixture(scope="module")
def machine(simulated):
    with simulated(4) as machine:
        yield machine

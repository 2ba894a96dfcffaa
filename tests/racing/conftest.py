"""Models over devices that run behind the host, open for a whole module."""

import pytest

from racing import asynchronous
from tl_devicefix.monkeypatch.versions import has_hooked_transformer

if not has_hooked_transformer():
    collect_ignore = ["test_detector.py", "test_offload.py"]


@pytest.fixture(scope="module")
def machine():
    with asynchronous(4) as machine:
        yield machine

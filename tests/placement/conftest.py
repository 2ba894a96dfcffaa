"""Planning needs no device: its tests name simulated ones, also where real devices are in use."""

import pytest

import tl_devicefix
from tl_devicefix.monkeypatch.versions import has_hooked_transformer

if not has_hooked_transformer():
    collect_ignore_glob = ["*"]


@pytest.fixture
def machine(n_devices):
    with tl_devicefix.simulate(n_devices) as machine:
        yield machine

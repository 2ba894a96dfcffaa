"""Planning needs no device: its tests name simulated ones, also where real devices are in use."""

import pytest

import tl_devicefix


@pytest.fixture
def machine(n_devices):
    with tl_devicefix.simulate(n_devices) as machine:
        yield machine

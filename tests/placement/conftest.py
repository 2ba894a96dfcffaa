"""Placements need no device: the tests name simulated ones, and are skipped on real devices."""

import pytest

import tl_devicefix


@pytest.fixture
def machine(n_devices):
    with tl_devicefix.simulate(n_devices) as machine:
        yield machine

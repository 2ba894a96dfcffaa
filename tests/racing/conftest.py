"""Devices that run behind the host, open for a whole module."""

import pytest
import torch

from racing import asynchronous


@pytest.fixture(scope="module")
def machine():
    with asynchronous(4) as machine:
        yield machine


@pytest.fixture
def sim(machine):
    """The module of the device, as torch gives it: `sim.Stream("sim:0")`."""
    return torch.get_device_module("sim")

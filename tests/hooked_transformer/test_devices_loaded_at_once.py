"""Components of different devices are loaded at once; those of one device one after the other."""

from __future__ import annotations

import threading

import pytest
from model_classes import HookedTransformer  # noqa: F401  # skips the file where there is none

from tl_devicefix.checkpoints.sources import HuggingFaceSource

pytestmark = pytest.mark.hooked

SOON = 30.0  # seconds, within which threads that run at once have met


@pytest.fixture
def load(load):
    """`load()`: a GPT-2, over four devices."""
    return lambda **options: load("gpt2", **{"n_devices": 4, **options})


@pytest.fixture
def while_reading(monkeypatch):
    """`while_reading(meanwhile)`: have this called whenever a unit is read."""
    read = HuggingFaceSource.read

    def have(meanwhile):
        def reading(self, unit, device):
            meanwhile(unit, device)
            return read(self, unit, device)

        monkeypatch.setattr(HuggingFaceSource, "read", reading)

    return have


def test_components_of_all_devices_are_read_at_once(load, while_reading):
    together, waited_for = threading.Barrier(4), set()

    def wait_for_the_others(unit, device):
        if device not in waited_for:
            waited_for.add(device)
            together.wait(SOON)

    while_reading(wait_for_the_others)
    load()

    assert len(waited_for) == 4

"""Components of different devices are loaded at once; those of one device one after the other."""

from __future__ import annotations

import threading
from collections import Counter
from unittest import mock

import pytest
import torch
from model_classes import HookedTransformer  # noqa: F401  # skips the file where there is none

from tl_devicefix.checkpoints.sources import HuggingFaceSource
from tl_devicefix.hooked_transformer import processing

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


@pytest.mark.parametrize("options", [{}, {"max_memory": {0: "30KB", 1: "30KB", "cpu": "1GB"}}])
def test_device_is_given_one_component_at_a_time(options, load, monkeypatch):
    now: Counter[torch.device] = Counter()
    most: Counter[torch.device] = Counter()
    fill_one = processing._fill_one

    def watched(model, source, placement, *rest):
        device = placement.device_of(rest[-1])
        now[device] += 1
        most[device] = max(most[device], now[device])
        fill_one(model, source, placement, *rest)
        now[device] -= 1

    monkeypatch.setattr(processing, "_fill_one", watched)
    model = load(**options, n_devices=None if options else 4)

    assert any(component.offloaded for component in model.placement.components) == bool(options)
    assert most == dict.fromkeys(model.placement.devices, 1)


def test_source_that_computes_weights_is_read_by_one_thread(load, while_reading, monkeypatch):
    read_by, original = set(), HuggingFaceSource.__init__

    def computing(self, *args):
        original(self, *args)
        self.computes = True

    monkeypatch.setattr(HuggingFaceSource, "__init__", computing)
    while_reading(lambda *_: read_by.add(threading.current_thread()))
    load()

    assert read_by == {threading.current_thread()}


def test_error_of_the_first_failing_component_is_raised(load, while_reading, machine):
    later_one_has_failed = threading.Event()

    def fail(unit, device):
        if unit == "unembed":
            later_one_has_failed.set()
            raise ValueError("unembed cannot be read")
        if unit == "blocks.1":
            assert later_one_has_failed.wait(SOON)
            raise ValueError("blocks.1 cannot be read")

    while_reading(fail)
    with pytest.raises(ValueError, match=r"blocks\.1 cannot be read") as caught:
        load(n_devices=None, device_map={"": 0, "blocks.1": 1, "unembed": 3})

    assert [machine.memory_allocated(index) for index in range(4)] == [0] * 4
    assert caught.value is not None


def test_components_of_the_cpu_are_loaded_by_several_threads(load, while_reading):
    expected, read_by = load(n_devices=1, device="cpu").state_dict(), set()
    while_reading(lambda *_: read_by.add(threading.current_thread()))
    with mock.patch.object(torch, "get_num_threads", return_value=2):
        state_dict = load(n_devices=1, device="cpu").state_dict()
    assert len(read_by) == 2
    assert all(torch.equal(tensor, expected[name]) for name, tensor in state_dict.items())

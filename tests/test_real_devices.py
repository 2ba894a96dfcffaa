"""Tests on real devices (`TL_DEVICEFIX_TEST_DEVICE`), with simulated ones in the place of these."""

from __future__ import annotations

import devices
import pytest
import torch

import tl_devicefix
from tl_devicefix import plan
from tl_devicefix.placement.devices import default_device, device_count, resolve


@pytest.mark.parametrize(
    "use",
    [
        lambda machine: devices.device(3),
        lambda machine: resolve("sim:2"),
        lambda machine: plan("gpt2", n_devices=4),
        lambda machine: plan("gpt2", device_map="balanced"),
        lambda machine: machine.memory_allocated(0),
    ],
)
def test_asking_a_real_machine_for_a_missing_device_skips(use, monkeypatch):
    with tl_devicefix.simulate(2):
        monkeypatch.setattr(devices, "TYPE", "sim")
        with devices.real_machine(2) as machine:
            assert [str(device) for device in machine.devices] == ["sim:0", "sim:1"]
            assert len(plan("gpt2", n_devices=2).devices) == device_count("sim") == 2
        with devices.real_machine(4) as machine:
            assert machine.devices[0] == default_device() == torch.device("sim:0")
            assert resolve(1) == torch.device("sim:1")
            with pytest.raises(pytest.skip.Exception, match=r"of type 'sim'|simulated devices on"):
                use(machine)

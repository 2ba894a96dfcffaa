"""A number is an index of the home device's type, also where TransformerLens would choose another.

As on a machine with XPUs, or with both kinds: TransformerLens's default is the CPU, or CUDA.
"""

import pytest
import torch
from model_classes import BRIDGE

from tl_devicefix import simulate
from tl_devicefix.placement import devices
from tl_devicefix.placement.devices import default_device


@pytest.fixture(scope="module")
def machine():
    """Four devices of a type that is not TransformerLens's default."""
    with simulate(4) as machine, pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "simulated_device", lambda: None)
        patch.setattr(devices, "_unsimulated_device", lambda: torch.device("cpu"))
        assert default_device() == torch.device("cpu")
        yield machine


def where(model):
    return [str(device) for device in model.placement.devices]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"device": "sim:2", "max_memory": {0: "1GiB", 2: "1GiB"}}, ["sim:2", "sim:0"]),
        ({"device_map": {"": "sim:0", "blocks": 1}}, ["sim:0", "sim:1"]),
        ({"device": "sim:3", "device_map": 3}, ["sim:3"]),
    ],
)
def test_number_means_a_device_of_the_home_devices_type(load, options, expected):
    model = load("gpt2", **options)
    assert where(model) == expected
    assert model.cfg.device == str(model.placement.home) == expected[0]


def test_spread_model_moves_to_a_number_as_to_its_name(load, model_class):
    model = load("gpt2", device="sim:0", n_devices=2)
    if model_class == BRIDGE:
        with pytest.warns(UserWarning, match="ignored: model is dispatched"):
            model.to(2)
        assert where(model) == ["sim:0", "sim:1"]
    else:
        assert where(model.to(2)) == ["sim:2"]


def test_a_model_leaves_the_cpu_for_torchs_device_of_that_number(load, machine):
    model = load("gpt2", device="cpu")
    assert next(model.to(1).parameters()).device == torch.device("sim:1")

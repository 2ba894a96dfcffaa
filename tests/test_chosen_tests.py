"""What tests are chosen by: a cover of a product, and devices (`TL_DEVICEFIX_TEST_DEVICE`)."""

from __future__ import annotations

import ast

import pytest
import real_devices
import torch
from covering import covering

import tl_devicefix
from tl_devicefix import plan
from tl_devicefix.placement import devices

if real_devices.TYPE:
    pytest.skip("real devices are in use, which these tests simulate", allow_module_level=True)


def test_asking_a_real_machine_for_a_missing_device_skips(monkeypatch):
    monkeypatch.setattr(real_devices, "TYPE", "sim")
    skipped = pytest.raises(pytest.skip.Exception, match=r"of type 'sim'|simulated devices only")
    with tl_devicefix.simulate(2):
        with real_devices.simulate(2) as machine:
            assert [str(device) for device in machine.devices] == ["sim:0", "sim:1"]
            assert len(plan("gpt2", n_devices=2).devices) == devices.device_count("sim") == 2
        with real_devices.simulate(4) as machine:
            assert machine.devices[0] == devices.default_device() == torch.device("sim:0")
            assert devices.resolve(1) == torch.device("sim:1")
            for use in (
                lambda machine: machine.devices[3],
                lambda machine: len(machine.devices),
                lambda machine: devices.resolve("sim:2"),
                lambda machine: plan("gpt2", n_devices=4),
                lambda machine: plan("gpt2", device_map="balanced"),
                lambda machine: machine.memory_allocated(0),
            ):
                with skipped:
                    use(machine)


def test_device_names_in_tests_become_those_of_real_devices(monkeypatch):
    monkeypatch.setattr(real_devices, "TYPE", "cuda")
    for code, expected in {
        "'sim'": "cuda",
        "f'sim:{i}'": "cuda:1",
        "'on sim:0, which simple'": "on cuda:0, which simple",
        "'simulate(2); to(sim:1)'": "simulate(2); to(sim:1)",
    }.items():
        renamed = real_devices._Named().visit(ast.parse(code, mode="eval"))
        assert eval(compile(renamed, "", "eval"), {"i": 1}) == expected


def test_cover_has_every_pair_of_a_group_and_every_other_value():
    product = [
        {"kind": kind, "spread": spread, "dtype": dtype}
        for kind, spread in (("llama", 1), ("llama", 3), ("llama", 4), ("gpt2", 4), ("bloom", 4))
        for dtype in ("float32", "bfloat16")
    ]
    cover = covering(product, [("kind", "spread")])
    assert len({(each["kind"], each["spread"]) for each in cover}) == len(cover) == 5
    assert {each["dtype"] for each in cover} == {"float32", "bfloat16"}

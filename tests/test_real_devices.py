"""What the tests do on real devices (`TL_DEVICEFIX_TEST_DEVICE`), tried on two simulated ones."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import real_devices
import torch

import tl_devicefix
from tl_devicefix import plan
from tl_devicefix.placement import devices

if real_devices.TYPE:
    pytest.skip("this is of what real devices do to the tests", allow_module_level=True)


@pytest.fixture(autouse=True)
def two_there(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with tl_devicefix.simulate(2):
        monkeypatch.setattr(real_devices, "TYPE", "sim")
        yield


def test_a_machine_has_the_devices_that_are_here() -> None:
    with real_devices.simulate(2) as machine:
        assert [str(device) for device in machine.devices] == ["sim:0", "sim:1"]
        assert devices.device_count("sim") == 2
        assert len(plan("gpt2", n_devices=2).devices) == 2


@pytest.mark.parametrize(
    "use",
    [
        lambda machine: machine.devices[3],
        lambda machine: len(machine.devices),
        lambda machine: devices.resolve(3),
        lambda machine: devices.resolve("sim:2"),
        lambda machine: plan("gpt2", n_devices=4),
        lambda machine: plan("gpt2", device_map="balanced"),
        lambda machine: machine.transfers,
        lambda machine: machine.memory_allocated(0),
    ],
)
def test_what_is_not_here_skips_the_test(use: Callable[[Any], Any]) -> None:
    with real_devices.simulate(4) as machine:
        assert machine.devices[0] == devices.default_device() == torch.device("sim:0")
        assert devices.resolve(1) == torch.device("sim:1")
        with pytest.raises(pytest.skip.Exception, match=r"of type 'sim'|simulated devices only"):
            use(machine)


def test_what_no_machine_has_is_an_error() -> None:
    with real_devices.simulate(2) as machine, pytest.raises(AttributeError, match="no machine has"):
        _ = machine.memory_alocated


def test_what_no_machine_of_that_size_has_is_refused() -> None:
    with real_devices.simulate(2), pytest.raises(ValueError, match=r"there are 2|has 2 device"):
        devices.resolve("sim:2")


def test_devices_of_a_given_size_skip_the_test() -> None:
    with pytest.raises(pytest.skip.Exception, match="of a given size"):
        real_devices.simulate(2, "1GiB").__enter__()


@pytest.mark.parametrize(
    ("kind", "code", "expected"),
    [
        ("cuda", "'sim:1'", "cuda:1"),
        ("cuda", "'sim'", "cuda"),
        ("cuda", "f'sim:{i}'", "cuda:1"),
        ("cuda", "'on sim:0, which simple'", "on cuda:0, which simple"),
        ("cuda", "'simulate(2); to(sim:1)'", "simulate(2); to(sim:1)"),
        ("cpu", "'sim:0'", "cpu"),
    ],
)
def test_names_of_devices_in_tests_are_those_of_real_ones(
    kind: str, code: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(real_devices, "TYPE", kind)
    renamed = real_devices._Named().visit(ast.parse(code, mode="eval"))
    assert eval(compile(renamed, "", "eval"), {"i": 1}) == expected

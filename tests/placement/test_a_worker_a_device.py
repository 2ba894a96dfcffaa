"""What is done to components on different devices is done at once, and ends as a loop would."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tl_devicefix
from tl_devicefix.placement.workers import each_on_its_device

UNITS = [0, 1, 2, 3, 4]


@pytest.fixture
def devices(machine: Any) -> list[torch.device]:
    """Where the units are done."""
    return [machine.devices[index] for index in (0, 0, 1, 1, 2)]


class Doing:
    """What is done to units, with what is called at each: `Doing({2: fail})`."""

    def __init__(self, at: dict[int, Callable[[], Any]] | None = None) -> None:
        self.begun: list[int] = []
        self.ended: list[int] = []
        self.threads: dict[int, threading.Thread] = {}
        self._at = at or {}

    def __call__(self, unit: int) -> None:
        self.begun.append(unit)
        self.threads[unit] = threading.current_thread()
        self._at.get(unit, bool)()
        self.ended.append(unit)


def raising(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def no_thread_is_left(doing: Doing) -> bool:
    others = set(doing.threads.values()) - {threading.current_thread()}
    return not any(thread.is_alive() for thread in others)


def test_after_an_error_no_unit_is_begun(devices: Any) -> None:
    many = list(range(500))
    doing = Doing({**dict.fromkeys(many, lambda: time.sleep(0.01)), 1: raising(ValueError("of 1"))})

    with pytest.raises(ValueError, match="of 1"):
        each_on_its_device(doing, many, devices * 100)

    assert len(doing.begun) < len(many)
    assert no_thread_is_left(doing)


def test_an_interrupt_where_the_caller_waits_ends_all(devices: Any) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    many = list(range(1000))
    doing = Doing(dict.fromkeys(many, lambda: time.sleep(0.01)))

    with pytest.raises(KeyboardInterrupt):
        each_on_its_device(doing, many, devices * 200, interrupt)

    assert sorted(doing.ended) == sorted(doing.begun) != many
    assert no_thread_is_left(doing)


def test_workers_share_the_cores_that_the_caller_uses(devices: Any) -> None:
    before = torch.get_num_threads()
    used: list[int] = []
    try:
        torch.set_num_threads(7)
        each_on_its_device(lambda _: used.append(torch.get_num_threads()), UNITS, devices)
        assert used == [2] * 5
        assert torch.get_num_threads() == 7
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_workers_are_in_the_caller_s_mode(mode: Any, devices: Any) -> None:
    def modes(_: Any = None) -> None:
        seen.add((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))

    seen: set[tuple[bool, bool]] = set()
    with mode():
        modes()
        each_on_its_device(modes, UNITS, devices)

    assert len(seen) == 1


def test_workers_use_the_caller_s_streams() -> None:
    with tl_devicefix.simulate(3, asynchronous=True) as machine:
        module: Any = torch.get_device_module("sim")
        streams = [module.Stream(device) for device in machine.devices]
        used: list[Any] = []
        for stream in streams:
            module.set_stream(stream)

        each_on_its_device(
            lambda device: used.append(module.current_stream(device)),
            machine.devices,
            machine.devices,
        )

        assert set(used) == set(streams)

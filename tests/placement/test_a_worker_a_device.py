"""What is done to components on different devices is done at once, and ends as a loop would."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from tl_devicefix.placement.workers import each_on_its_device

pytestmark = pytest.mark.hooked


@pytest.fixture
def devices(machine):
    """Where the units are done."""
    return [machine.devices[index] for index in (0, 0, 1, 1, 2)]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_no_unit_begins_after_an_error_or_interrupt(error, devices):
    many, begun, ended, threads = list(range(500)), set(), set(), set()

    def do(unit):
        threads.add(threading.current_thread())
        begun.add(unit)
        if unit == 1 and error is ValueError:
            raise error
        time.sleep(0.01)
        ended.add(unit)

    def done():
        if error is KeyboardInterrupt:
            raise error

    with pytest.raises(error):
        each_on_its_device(do, many, devices * 100, done)

    assert begun - ended == ({1} if error is ValueError else set())
    assert len(begun) < len(many)
    assert not any(thread.is_alive() for thread in threads - {threading.current_thread()})


@pytest.mark.parametrize(
    "mode",
    [torch.inference_mode, torch.enable_grad, lambda: torch.autocast("cpu", torch.float16)],
)
def test_workers_share_the_callers_cores_and_modes(mode, devices):
    before, used, seen = torch.get_num_threads(), [], set()

    def do(_):
        used.append(torch.get_num_threads())
        seen.add((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        seen.add((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))

    try:
        torch.set_num_threads(7)
        with mode():
            each_on_its_device(do, [0, 1, 2, 3, 4], devices)
            assert used == [2] * 5
            do(None)
        assert used[-1] == 7
    finally:
        torch.set_num_threads(before)
    assert len(seen) == 2

"""What is done to components on different devices is done at once, and ends as a loop would."""

from __future__ import annotations

import threading
import time

import pytest

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

"""What went between each two devices, as a table and for programs."""

from __future__ import annotations

import torch

from tl_devicefix.simulation import Moved, Transfer, simulate
from tl_devicefix.simulation import machine as machines


def test_transfers_are_summed_by_pair():
    with simulate(12) as machine:
        x = torch.ones(256, device="sim:1")
        for _ in range(3):
            x.to("sim:0")
        x.to("sim:11")
        x.to("sim:2")
        torch.ones(2).to("sim:1")
    pairs = {(str(a), str(b)): moved for (a, b), moved in machine.transfers.by_pair().items()}
    assert pairs == {
        ("cpu", "sim:1"): Moved(1, 8),
        ("sim:1", "sim:0"): Moved(3, 3072),
        ("sim:1", "sim:2"): Moved(1, 1024),
        ("sim:1", "sim:11"): Moved(1, 1024),
    }
    assert list(pairs)[-1] == ("sim:1", "sim:11")
    assert repr(machine.transfers).splitlines() == [
        "cpu -> sim:1     1   8 bytes",
        "sim:1 -> sim:0   3  3.00 KiB",
        "sim:1 -> sim:2   1  1.00 KiB",
        "sim:1 -> sim:11  1  1.00 KiB",
        "all              6  5.01 KiB",
    ]
    assert isinstance(machine.transfers[0], Transfer)
    assert repr(machine.transfers[-2:]).splitlines() == [
        "cpu -> sim:1    1   8 bytes",
        "sim:1 -> sim:2  1  1.00 KiB",
        "all             2  1.01 KiB",
    ]


def test_many_are_summed_and_the_last_are_kept():
    n = 2 * machines._KEPT + 5
    with simulate(2) as machine:
        machine.record_transfer(torch.device("cpu"), machine.devices[1], torch.ones(2))
        for _ in range(n):
            machine.record_transfer(*machine.devices, torch.ones(1))
        assert machines._KEPT <= len(machine.transfers) < 2 * machines._KEPT
        for counted in (machine.transfers, machine.transfers.copy()):
            assert list(counted.by_pair().values()) == [Moved(1, 8), Moved(n, 4 * n)]
            assert repr(counted).split()[-4:-2] == ["all", str(n + 1)]
        machine.reset_transfers()
        assert machine.transfers.by_pair() == {}


def test_nothing_moved():
    with simulate(2) as machine:
        assert machine.transfers == []
        assert machine.transfers.by_pair() == {}
        assert repr(machine.transfers) == "all  0  0 bytes"

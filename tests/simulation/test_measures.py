"""What the simulated machine measures: transfers, and memory on each device."""

import pytest
import torch

from tl_devicefix.simulation import Transfer, simulate

pytestmark = pytest.mark.once

CPU, SIM_0, SIM_1 = "cpu", "sim:0", "sim:1"


def routes(machine):
    return [(str(t.source), str(t.target), t.bytes, tuple(t.shape)) for t in machine.transfers]


def test_only_copies_between_devices_are_recorded_in_order():
    with simulate(2) as machine:
        x = torch.zeros(2, 3).to(SIM_0)
        y = x.to(SIM_1, torch.float64)
        y.cpu()
        x.copy_(y)
        assert routes(machine) == [
            (CPU, SIM_0, 24, (2, 3)),
            (SIM_0, SIM_1, 48, (2, 3)),
            (SIM_1, CPU, 48, (2, 3)),
            (SIM_1, SIM_0, 24, (2, 3)),
        ]
        assert isinstance(machine.transfers[0], Transfer)
        machine.reset_transfers()
        assert y.to(SIM_1) is y
        y.clone().float().copy_(y + torch.tensor(1.0))
        torch.zeros(2).double()
        x = torch.zeros(4, device=SIM_0, requires_grad=True)
        assert machine.transfers == []
        x.to(SIM_1).sum().backward()
        assert routes(machine) == [(SIM_0, SIM_1, 16, (4,)), (SIM_1, SIM_0, 16, (4,))]


def test_memory_is_that_of_live_storages():
    with simulate(2) as machine:
        x = torch.zeros(10, device=SIM_1)
        view = x[2:].view(2, 4)
        detached = x.detach()
        assert machine.memory_allocated(1) == machine.memory_allocated(SIM_1) == 40
        assert machine.memory_allocated(0) == 0
        y = x + 1
        assert machine.memory_allocated(1) == 80
        del x, y, detached
        assert machine.memory_allocated(1) == 40, "a view keeps the storage"
        del view
        assert machine.memory_allocated(1) == 0
        assert machine.max_memory_allocated(1) == 80
        x = torch.arange(10, device=SIM_0).resize_(20)
        assert machine.memory_allocated(0) == x.nbytes == 160
        machine.reset_peak_memory_stats(1)
        assert machine.max_memory_allocated(1) == 0


@pytest.mark.parametrize("memory", [1024, "1KiB", [10**9, "1KiB"]])
def test_more_than_the_memory_raises_out_of_memory(memory):
    message = r"Tried to allocate 1\.0 KiB\. Device 1 has a total capacity of 1\.0 KiB of which"
    with simulate(2, memory=memory) as machine:
        x = torch.zeros(128, device=SIM_1)
        with pytest.raises(torch.OutOfMemoryError, match=message):
            torch.zeros(256, device=SIM_1)
        with pytest.raises(torch.OutOfMemoryError, match=message):
            torch.cat([x, x])
        assert machine.memory_allocated(1) == 512
        with pytest.raises(torch.OutOfMemoryError, match=r"93132\.26 GiB"):  # before it is made
            torch.empty(10**14, dtype=torch.uint8, device=SIM_1)
        del x
        torch.zeros(256, device=SIM_1)


def test_transfers_are_summed_by_pair():
    with simulate(12) as machine:
        x = torch.ones(256, device="sim:1")
        for _ in range(3):
            x.to("sim:0")
        x.to("sim:11")
        x.to("sim:2")
        torch.ones(2).to("sim:1")
    assert repr(machine.transfers).splitlines() == [
        "cpu -> sim:1     1  8 bytes",
        "sim:1 -> sim:0   3  3.0 KiB",
        "sim:1 -> sim:2   1  1.0 KiB",
        "sim:1 -> sim:11  1  1.0 KiB",
        "all              6  5.0 KiB",
    ]
    from_cpu = machine.transfers.by_pair()[torch.device(CPU), torch.device(SIM_1)]
    assert (from_cpu.count, from_cpu.bytes) == (1, 8)

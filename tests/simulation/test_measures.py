"""What the simulated machine measures: transfers, and memory, also without values."""

import psutil
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


# `simulate(..., values=False)`: devices, shapes and sizes, but nothing is computed.


@pytest.fixture
def machine():
    with simulate(2, "1TiB", values=False) as machine:
        yield machine


def test_tensors_of_any_size_take_no_memory_of_the_host(machine):
    before = psutil.Process().memory_info().rss
    big = torch.zeros(200_000, 400_000, device="sim:1")
    product = big.T @ big[:, :10]
    assert product.shape == (400_000, 10)
    assert machine.memory_allocated(1) == 4 * (200_000 * 400_000 + 400_000 * 10)
    assert psutil.Process().memory_info().rss - before < 2**24


def test_devices_and_shapes_are_checked(machine):
    one, other = torch.ones(2, 3, device="sim:0"), torch.ones(2, 3, device="sim:1")
    with pytest.raises(RuntimeError, match="sim:0 and sim:1"):
        one + other
    with pytest.raises(RuntimeError, match=r"same reduction dim|cannot be multiplied"):
        one @ one
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        torch.empty(2**40, device="sim:0")
    with pytest.raises(NotImplementedError, match=r"_unique2.* depends on values"):
        torch.unique(one)


def test_reading_a_tensor_without_values_gives_0(machine):
    x = torch.randn(3, 4, device="sim:0")
    assert x.sum().item() == 0
    assert not (x > 0).all()
    assert x[0].tolist() == [0, 0, 0, 0]
    assert x.cpu().count_nonzero() == 0
    assert x.argmax(-1).cpu().dtype == torch.int64
    assert x.to(torch.bfloat16).cpu().dtype == torch.bfloat16
    assert x[x > 0].shape == (12,)  # a mask selects all
    assert repr(x[0]) == "tensor(..., size=(4,), device='sim:0')"


@pytest.mark.parametrize("lie", ["by heads", "by positions"])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_takes_the_memory_it_takes_with_values(lie, masked):
    def attend():
        q = torch.zeros(1, 4, 256, 8, device="sim:0", requires_grad=True)
        k = torch.zeros(1, 2, 256, 8, device="sim:0")
        if lie == "by positions":
            q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
        mask = torch.ones(256, 256, dtype=torch.bool, device="sim:0") if masked else None
        options = {"attn_mask": mask, "is_causal": not masked, "enable_gqa": True}
        z = torch.nn.functional.scaled_dot_product_attention(q, k, k, **options)
        (gradient,) = torch.autograd.grad(z.sum(), q)
        return [z.stride(), gradient.stride()], machine.max_memory_allocated(0)

    with simulate(1) as machine:
        expected = attend()
    with simulate(1, values=False) as machine:
        assert attend() == expected


def test_backward_without_values_gives_shapes_and_devices(machine):
    weight = torch.nn.Parameter(torch.randn(4, 4, device="sim:1"))
    (weight @ weight).relu().sum().backward()
    assert (weight.grad.shape, weight.grad.device) == (weight.shape, torch.device("sim:1"))


def test_a_mask_on_the_host_selects_as_many_rows_as_it_has():
    with simulate(1, values=False):
        rows = torch.ones(3, 4, device="sim:0")
        for mask in ([True, True, False], [True, True, True], [False] * 3):
            assert rows[torch.tensor(mask)].shape == (sum(mask), 4)

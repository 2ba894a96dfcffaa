"""`simulate(..., values=False)`: devices, shapes and sizes, but nothing is computed."""

import psutil
import pytest
import torch

from tl_devicefix.simulation import simulate

pytestmark = pytest.mark.once


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

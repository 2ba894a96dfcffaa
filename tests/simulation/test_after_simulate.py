"""Tensors that are kept after `simulate` is left: read as any, and not computed with."""

from __future__ import annotations

import copy
import io

import pytest
import torch

from tl_devicefix.simulation import simulate


@pytest.fixture
def kept():
    """A tensor with a history, and one of integers, of a machine that has been left."""
    with simulate(2):
        x = torch.arange(4.0, device="sim:1", requires_grad=True)
        return x * 2, torch.arange(3, device="sim:0")


def test_they_can_be_read(kept):
    x, n = kept
    assert x.cpu().tolist() == [0, 2, 4, 6]
    assert x.data.to("cpu", torch.float64).tolist() == [0, 2, 4, 6]
    assert (x.numpy(force=True) == [0, 2, 4, 6]).all()
    assert repr(n[1:]) == "tensor([1, 2], device='sim:0')"
    assert f"{x[1]:.1f} {n[2]}" == "2.0 2"
    assert (x[3].item(), bool(n[1]), "abc"[n[1]], list(map(int, n))) == (6, True, "b", [0, 1, 2])
    assert x.detach().view(2, 2).T.contiguous().tolist() == [[0, 4], [2, 6]]
    assert copy.deepcopy(n).cpu().tolist() == [0, 1, 2]
    assert torch.zeros(3).copy_(n).tolist() == [0, 1, 2]
    torch.save(n, io.BytesIO())


def test_they_are_not_computed_with_and_the_error_says_how(kept):
    x, n = kept
    for compute in (lambda: x + 1, lambda: x @ torch.ones(4), lambda: x.to("sim:0"), n.zero_):
        with pytest.raises(RuntimeError, match=r"has been left.*compute with its \.cpu\(\)"):
            compute()


def test_another_machine_takes_a_copy(kept):
    x, _ = kept
    with simulate(2):
        other = torch.ones(4, device="sim:1")
        with pytest.raises(RuntimeError, match="has been left"):
            other + x
        assert (other + x.detach().cpu().to("sim:1")).tolist() == [1, 3, 5, 7]
    with pytest.raises(RuntimeError, match="no sim device here"):
        torch.ones(2, device="sim:1")

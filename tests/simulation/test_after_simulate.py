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


READS = {
    "cpu": lambda x, n: x.cpu().tolist() == [0, 2, 4, 6],
    "data": lambda x, n: x.data.to("cpu", torch.float64).tolist() == [0, 2, 4, 6],
    "numpy": lambda x, n: (x.numpy(force=True) == [0, 2, 4, 6]).all(),
    "print": lambda x, n: repr(n[1:]) == "tensor([1, 2], device='sim:0')",
    "format": lambda x, n: f"{x[1]:.1f} {n[2]}" == "2.0 2",
    "numbers": lambda x, n: x[3].item() == 6 and bool(n[1]) and "abc"[n[1]] == "b",
    "iterate": lambda x, n: [int(element) for element in n] == [0, 1, 2],
    "views": lambda x, n: x.detach().view(2, 2).T.contiguous().tolist() == [[0, 4], [2, 6]],
    "deepcopy": lambda x, n: copy.deepcopy(n).cpu().tolist() == [0, 1, 2],
    "copy_": lambda x, n: torch.zeros(3).copy_(n).tolist() == [0, 1, 2],
    "save": lambda x, n: torch.save(n, io.BytesIO()) is None,
}


@pytest.mark.parametrize("read", READS)
def test_they_can_be_read(kept, read):
    assert READS[read](*kept)


COMPUTATIONS = {
    "add": (lambda x, n: x + 1, lambda x, n: x.cpu() + 1),
    "mix": (lambda x, n: x @ torch.ones(4), lambda x, n: x.cpu() @ torch.ones(4)),
    "move": (lambda x, n: x.to("sim:0"), lambda x, n: x.cpu()),
    "change": (lambda x, n: n.add_(1), lambda x, n: n.cpu().add_(1)),
}


@pytest.mark.parametrize("computation", COMPUTATIONS)
def test_they_are_not_computed_with_and_the_error_says_how(kept, computation):
    refused, advised = COMPUTATIONS[computation]
    with pytest.raises(RuntimeError, match=r"has been left.*compute with its \.cpu\(\)"):
        refused(*kept)
    advised(*kept)


def test_another_machine_takes_a_copy(kept):
    x, _ = kept
    with simulate(2):
        other = torch.ones(4, device="sim:1")
        with pytest.raises(RuntimeError, match="has been left"):
            other + x
        assert (other + x.detach().cpu().to("sim:1")).tolist() == [1, 3, 5, 7]
    with pytest.raises(RuntimeError, match="no sim device here"):
        torch.ones(2, device="sim:1")

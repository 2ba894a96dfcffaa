"""Tensors that are kept after `simulate` is left: read as any, and not computed with."""

from __future__ import annotations

import copy
import io

import numpy
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
    "detach, cpu": lambda x, n: x.detach().cpu().tolist() == [0, 2, 4, 6],
    "data": lambda x, n: x.data.cpu().tolist() == [0, 2, 4, 6],
    "to": lambda x, n: x.detach().to("cpu", torch.float64).dtype == torch.float64,
    "numpy": lambda x, n: (x.detach().cpu().numpy() == [0, 2, 4, 6]).all(),
    "numpy, forced": lambda x, n: (x.numpy(force=True) == [0, 2, 4, 6]).all(),
    "asarray": lambda x, n: numpy.asarray(x.detach().cpu())[1] == 2,
    "print": lambda x, n: repr(n) == "tensor([0, 1, 2], device='sim:0')",
    "print an element": lambda x, n: repr(n[1]) == "tensor(1, device='sim:0')",
    "print a row": lambda x, n: (
        repr(x.detach().view(2, 2)[0]) == "tensor([0., 2.], device='sim:1')"
    ),
    "format": lambda x, n: f"{x[1]:.1f} {n[2]}" == "2.0 2",
    "item": lambda x, n: x[3].item() == 6,
    "float": lambda x, n: float(x[3]) == 6,
    "index of a list": lambda x, n: "abc"[n[1]] == "b",
    "truth": lambda x, n: bool(n[1]) and not n[0],
    "tolist": lambda x, n: n[1:].tolist() == [1, 2],
    "iterate": lambda x, n: [int(each) for each in n] == [0, 1, 2],
    "views": lambda x, n: x.detach().view(2, 2).T[0].cpu().tolist() == [0, 4],
    "contiguous": lambda x, n: (
        x.detach().view(2, 2).T.contiguous().cpu().tolist() == [[0, 4], [2, 6]]
    ),
    "clone": lambda x, n: n.clone().cpu().tolist() == [0, 1, 2],
    "deepcopy": lambda x, n: copy.deepcopy(n).cpu().tolist() == [0, 1, 2],
    "copy_": lambda x, n: torch.zeros(3).copy_(n).tolist() == [0, 1, 2],
    "save": lambda x, n: torch.save(n, io.BytesIO()) is None,
}


@pytest.mark.parametrize("read", READS)
def test_they_can_be_read(kept, read):
    assert READS[read](*kept)


COMPUTATIONS = {
    "add": (lambda x, n: x + 1, lambda x, n: x.cpu() + 1),
    "sum": (lambda x, n: n.sum(), lambda x, n: n.cpu().sum()),
    "mix": (lambda x, n: x @ torch.ones(4), lambda x, n: x.cpu() @ torch.ones(4)),
    "convert": (lambda x, n: x.half(), lambda x, n: x.cpu().half()),
    "move": (lambda x, n: x.to("sim:0"), lambda x, n: x.cpu()),
    "change": (lambda x, n: n.add_(1), lambda x, n: n.cpu().add_(1)),
    "select": (lambda x, n: x[n > 0], lambda x, n: x.cpu()[n.cpu().nonzero()]),
}


@pytest.mark.parametrize("computation", COMPUTATIONS)
def test_they_are_not_computed_with_and_the_error_says_how(kept, computation):
    refused, advised = COMPUTATIONS[computation]
    with pytest.raises(RuntimeError, match=r"has been left.*compute with a copy, \.cpu\(\)"):
        refused(*kept)
    advised(*kept)


def test_another_machine_takes_a_copy(kept):
    x, _ = kept
    with simulate(2):
        here = torch.ones(4, device="sim:1")
        with pytest.raises(RuntimeError, match="has been left"):
            here + x
        assert (here + x.detach().cpu().to("sim:1")).tolist() == [1, 3, 5, 7]


def test_the_errors_of_an_open_machine_stay():
    with simulate(2):
        x, y = (torch.ones(3, device=f"sim:{i}") for i in (0, 1))
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            x.view_as(x).add(y)

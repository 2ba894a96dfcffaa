"""Several threads of the host that give work to simulated devices at once."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tl_devicefix.simulation import Machine, simulate


@pytest.fixture(params=[False, True], ids=["at once", "behind"])
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    with simulate(2, asynchronous=request.param) as machine:
        yield machine


@pytest.fixture
def switching_often() -> Iterator[None]:
    """Threads take turns within operations too."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def elsewhere(function: Callable[[], Any]) -> Any:
    """What a function returns, or raises, in another thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_streams_that_threads_are_within_are_their_own() -> None:
    with simulate(2, asynchronous=True):
        sim = torch.get_device_module("sim")
        side = sim.Stream("sim:1")
        with sim.stream(side):
            assert sim.current_device() == 1
            assert elsewhere(sim.current_device) == 0
            assert elsewhere(lambda: sim.current_stream("sim:1")) == sim.default_stream("sim:1")
            assert sim.current_stream("sim:1") == side
        assert sim.current_device() == 0


def loss_of(weight: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return ((weight * 2).to(other.device) * other).sum()


@pytest.mark.parametrize("call", ["backward", "grad"])
def test_a_backward_may_be_called_in_any_thread(machine: Machine, call: str) -> None:
    weight = torch.full((3,), 5.0, device="sim:1", requires_grad=True)
    other = torch.full((3,), 7.0, device="sim:0", requires_grad=True)

    def differentiate() -> list[Any]:
        if call == "grad":
            return list(torch.autograd.grad(loss_of(weight, other), [weight, other]))
        loss_of(weight, other).backward()
        return [weight.grad, other.grad]

    assert [gradient.tolist() for gradient in elsewhere(differentiate)] == [[14.0] * 3, [10.0] * 3]
    assert torch.autograd.is_multithreading_enabled()  # the caller's setting is as it was


def layers() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.LayerNorm(6), torch.nn.GELU())


def run(one: Any, two: Any, first: str, last: str, number: int) -> list[torch.Tensor]:
    """A forward over two devices, partly on another stream, and gradients of the input."""
    x = torch.arange(30.0).view(5, 6).add(number).requires_grad_()
    bias = torch.full((6,), float(number))
    hidden = one(x.to(first))
    sim = torch.get_device_module("sim") if first != "cpu" else None
    if hasattr(sim, "Stream"):
        current, side = sim.current_stream(first), sim.Stream(first)
        side.wait_stream(current)
        with sim.stream(side):
            changed = hidden * 1.5
        hidden.record_stream(side)
        current.wait_stream(side)
        changed.record_stream(current)
        hidden = changed + bias.pin_memory().to(first, non_blocking=True)
    else:
        hidden = hidden * 1.5 + bias.to(first)
    logits = two(hidden.to(last))
    (gradient,) = torch.autograd.grad((logits**2).sum(), x)
    return [logits.detach().cpu(), gradient]


def test_what_several_threads_run_at_once_is_what_they_give_one_by_one(
    machine: Machine, switching_often: None
) -> None:
    expected = [run(layers(), layers(), "cpu", "cpu", number) for number in range(16)]
    one, two = layers().to("sim:0"), layers().to("sim:1")
    before = [machine.memory_allocated(device) for device in machine.devices]
    with ThreadPoolExecutor(8) as pool:
        actual = list(pool.map(lambda n: run(one, two, "sim:0", "sim:1", n), range(16)))
    for expecteds, founds in zip(expected, actual):
        for tensor, other in zip(expecteds, founds):
            assert torch.equal(tensor, other)
    gc.collect()
    assert [machine.memory_allocated(device) for device in machine.devices] == before

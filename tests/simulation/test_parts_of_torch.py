"""What torch has beside plain tensors and gradients, on simulated devices."""

from __future__ import annotations

import copy
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import tl_devicefix
from tl_devicefix.simulation.machine import Machine


@pytest.fixture(params=[False, True], ids=["", "behind"])
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    with tl_devicefix.simulate(2, asynchronous=request.param) as machine:
        yield machine


def dense() -> torch.Tensor:
    return torch.tensor([[0.0, 2.0, 0.0], [3.0, 0.0, 4.0]])


MADE_OF_SCALARS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "tensor, nested": lambda x, y: torch.tensor([[x[1]], (y[2],)], device="sim:0"),
    "tensor, of one element each": lambda x, y: torch.tensor([x[1:2], y[2:]], device="sim:1"),
    "as_tensor": lambda x, y: torch.as_tensor([x[1], y[2]], dtype=torch.float64),
    "new_tensor": lambda x, y: x.new_tensor([x[1], y[2]]),
    "LongTensor": lambda x, y: torch.LongTensor([x[1].long(), 4]),
}


@pytest.mark.parametrize("made", MADE_OF_SCALARS)
@pytest.mark.parametrize("options", [{}, {"values": False}, {"asynchronous": True}], ids=str)
def test_data_may_have_scalars_of_devices_in_it(made: str, options: dict[str, Any]) -> None:
    with tl_devicefix.simulate(2, **options):
        x, y = (torch.arange(3.0).to(f"sim:{index}") * 2 for index in range(2))

        tensor = MADE_OF_SCALARS[made](x, y)

        if options.get("values", True):
            assert tensor.flatten().tolist() == [2, 4]
        assert tensor.numel() == 2


def test_sparse_tensors_compute_and_move(machine: Machine) -> None:
    sparse = dense().to("sim:1").to_sparse()

    assert machine.memory_allocated("sim:1") == 3 * 4 + 6 * 8
    assert (sparse.device, sparse._nnz()) == (torch.device("sim:1"), 3)
    product = sparse @ torch.ones(3, 2, device="sim:1")
    assert product.device == sparse.device
    assert torch.equal(product.cpu(), dense() @ torch.ones(3, 2))
    machine.reset_transfers()
    for moved in (sparse.to("sim:0"), sparse.cpu(), copy.deepcopy(sparse)):
        assert moved.layout == sparse.layout
        assert torch.equal(moved.to_dense().cpu(), dense())
    assert [transfer.bytes for transfer in machine.transfers] == [60, 60, 24, 24]


def test_a_generator_on_a_device_gives_the_cpu_s_numbers(machine: Machine) -> None:
    generator = torch.Generator("sim:1").manual_seed(3)
    assert generator.device == torch.device("sim:1")
    assert torch.Generator("sim").device == torch.device("sim:0")
    with pytest.raises(RuntimeError, match=r"device sim:7 does not exist: .* 2 device"):
        torch.Generator("sim:7")
    actual = torch.randn(4, device="sim:1", generator=generator)
    assert torch.equal(actual.cpu(), torch.randn(4, generator=torch.Generator().manual_seed(3)))


INTERRUPTED = """
import os, random, signal, threading, time
os.environ["TL_DEVICEFIX_DISABLE"] = "1"  # TransformerLens need not be imported
import torch
from tl_devicefix.simulation import simulate

with simulate(2):
    weight = torch.ones(8, 8, device="sim:0", requires_grad=True)
    end = time.time() + 1

    def interrupt():
        while time.time() < end:
            time.sleep(random.uniform(0.002, 0.01))
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    while thread.is_alive():
        try:
            x = weight
            for _ in range(20):
                x = (x @ weight).tanh().to("sim:1").to("sim:0")
            x.sum().backward()
        except KeyboardInterrupt:
            pass
"""


def test_an_interrupt_while_torch_records_does_not_abort_the_process() -> None:
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, check=False)
    assert ended.returncode not in (-signal.SIGABRT, -signal.SIGSEGV), ended.stderr

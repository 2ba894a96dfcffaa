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
import torch.nn.functional as F

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
    assert [transfer.bytes for transfer in machine.transfers] == [
        60,
        60,
        24,
        24,
    ]  # 3 values, 6 indices


def test_a_generator_on_a_device_gives_the_cpu_s_numbers(machine: Machine) -> None:
    generator = torch.Generator("sim:1").manual_seed(3)
    assert generator.device == torch.device("sim:1")
    assert torch.Generator("sim").device == torch.device("sim:0")
    with pytest.raises(RuntimeError, match=r"device sim:7 does not exist: .* 2 device"):
        torch.Generator("sim:7")
    actual = torch.randn(4, device="sim:1", generator=generator)
    assert torch.equal(actual.cpu(), torch.randn(4, generator=torch.Generator().manual_seed(3)))


OPERATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mm": lambda x: x @ x.T,
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "linear": lambda x: F.linear(x, x, x[:, 0]),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "softmax": lambda x: x.softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x, (3,)),
    "cat": lambda x: torch.cat([x, x.bfloat16()]),
    "cross_entropy": lambda x: F.cross_entropy(x.bfloat16(), x.long()[:, 0] * 0),
    "float64": lambda x: x.double() @ x.double().T,
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_autocast_casts_as_on_the_cpu(name: str, machine: Machine) -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            return OPERATIONS[name](x)

    actual, expected = run(dense().to("sim:1")), run(dense())
    assert (actual.device, actual.dtype) == (torch.device("sim:1"), expected.dtype)
    assert torch.equal(actual.cpu(), expected)


@pytest.mark.parametrize("function", [F.silu, F.mish])
def test_gradients_are_those_of_the_cpu_s_own_kernel(
    function: Callable[[torch.Tensor], torch.Tensor], machine: Machine
) -> None:
    values = torch.linspace(-9, 9, 1001)

    on_cpu, on_device = values.clone().requires_grad_(), values.to("sim:1").requires_grad_()
    for leaf in (on_cpu, on_device):
        function(leaf).sum().backward()

    assert on_cpu.grad is not None
    assert on_device.grad is not None
    assert torch.equal(on_device.grad.cpu(), on_cpu.grad)


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

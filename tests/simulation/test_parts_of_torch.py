"""What torch has beside plain tensors and gradients, and what scripts and threads do."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import tl_devicefix

pytestmark = pytest.mark.once

ROOT = Path(tl_devicefix.__file__).parents[1]


MADE_OF_SCALARS = {
    "tensor, nested": lambda x, y: torch.tensor([[x[1]], (y[2],)], device="sim:0"),
    "tensor, of one element each": lambda x, y: torch.tensor([x[1:2], y[2:]], device="sim:1"),
    "as_tensor": lambda x, y: torch.as_tensor([x[1], y[2]], dtype=torch.float64),
    "new_tensor": lambda x, y: x.new_tensor([x[1], y[2]]),
    "LongTensor": lambda x, y: torch.LongTensor([x[1].long(), 4]),
}


@pytest.mark.parametrize("made", MADE_OF_SCALARS)
@pytest.mark.parametrize("values", [True, False])
def test_data_may_have_scalars_of_devices_in_it(made, values):
    with tl_devicefix.simulate(2, values=values):
        x, y = (torch.arange(3.0).to(f"sim:{index}") * 2 for index in range(2))
        tensor = MADE_OF_SCALARS[made](x, y)
        if values:
            assert tensor.flatten().tolist() == [2, 4]
        assert tensor.numel() == 2


# An interrupt during a backward; then the process forks, and both end within `simulate`.
SCRIPT = """
import os, signal, torch
from tl_devicefix.simulation import simulate

handler = signal.default_int_handler
signal.signal(signal.SIGINT, handler)  # a parent may have it ignored
with simulate(2) as machine:
    x = torch.ones(3, device="sim:0", requires_grad=True)
    loss, gradient = (x * 2).to("sim:1").sum(), torch.ones((), device="sim:1")
    run = machine.executor.run

    def interrupted(*args):
        signal.raise_signal(signal.SIGINT)
        return run(*args)

    machine.executor.run = interrupted
    try:
        loss.backward(gradient)
    except KeyboardInterrupt:
        machine.executor.run = run
        print(x.grad.tolist(), flush=True)
    assert signal.getsignal(signal.SIGINT) is handler

child = os.fork()
entered = simulate(2)
entered.__enter__()
torch.ones(3, device="sim:1").cpu()
if child:
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_interrupt_waits_for_backward_and_script_ends_simulating():
    """Torch alone would end the process at either."""
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "TL_DEVICEFIX_DISABLE": "1",
            # By default, the child's torch waits 10 s for autograd's threads, which it lacks.
            "TORCH_AUTOGRAD_SHUTDOWN_WAIT_LIMIT": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )

    assert (ended.returncode, ended.stdout) == (0, "[2.0, 2.0, 2.0]\n0\n"), ended.stderr
    ignored = ended.stderr.partition("Exception ignored")[2]
    assert not any(ours in ignored for ours in ("callbacks", "simulat"))  # others may say it too


def test_fork_rng_restores_the_random_numbers(machine):
    draw = lambda: [torch.rand(2, device=device).cpu() for device in (*machine.devices[:2], "cpu")]  # noqa: E731
    torch.manual_seed(0)
    expected = torch.stack(draw())
    torch.manual_seed(0)
    with torch.random.fork_rng():
        draw()
    assert torch.equal(torch.stack(draw()), expected)


def test_a_modules_backward_hook_gets_gradients_of_two_devices(machine):
    module = torch.nn.Identity()
    module.forward = lambda x: (x * 3).to("sim:1")
    double = lambda module, of_inputs, of_outputs: (of_inputs[0] * 2,)  # noqa: E731
    module.register_full_backward_hook(double)
    x = torch.ones(2, device="sim:0", requires_grad=True)
    module(x).sum().backward()
    assert x.grad.tolist() == [6.0, 6.0]


def test_a_hook_that_fails_after_the_simulation_raises():
    x = torch.ones(2, requires_grad=True)
    with tl_devicefix.simulate(2):
        x.register_hook(lambda gradient: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            x.sum().backward()


def test_a_backward_may_be_called_in_any_thread(machine):
    weight = torch.full((3,), 5.0, device="sim:1", requires_grad=True)
    other = torch.full((3,), 7.0, device="sim:0", requires_grad=True)

    def differentiate():
        ((weight * 2).to(other.device) * other).sum().backward()
        loss = ((weight * 2).to(other.device) * other).sum()
        return [weight.grad, other.grad], torch.autograd.grad(loss, [weight, other])

    with ThreadPoolExecutor(1) as pool:
        for gradients in pool.submit(differentiate).result():
            assert [gradient.tolist() for gradient in gradients] == [[14.0] * 3, [10.0] * 3]
    assert torch.autograd.is_multithreading_enabled()  # the caller's setting is as it was
